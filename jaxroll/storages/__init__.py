"""What was collected: storages as immutable pytrees with pure verbs."""

from jaxroll.storages.base import Batches, Storage, add_donated
from jaxroll.storages.decoupled import DecoupledRolloutStorage
from jaxroll.storages.distributed import DistributedStorage, RingCounters, Unrolls
from jaxroll.storages.rollout import RolloutStorage

__all__ = [
    "Batches",
    "DecoupledRolloutStorage",
    "DistributedStorage",
    "RingCounters",
    "RolloutStorage",
    "Storage",
    "Unrolls",
    "add_donated",
]
