"""jaxroll: rollouts, advantages and minibatches as parts that live inside your own jit.

Names load when they are first used, so that `import jaxroll` costs next to nothing and touches no
device. See the README for the conventions (axes, truncation, keys, logical actors).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxroll._version import __version__

if TYPE_CHECKING:
    from jaxroll import estimators as estimators
    from jaxroll import minibatches as minibatches
    from jaxroll import spaces as spaces
    from jaxroll import storages as storages
    from jaxroll.estimators import (
        discounted_returns,
        gae,
        lambda_returns,
        n_step_returns,
        normalize,
        retrace,
        vtrace,
    )
    from jaxroll.storages import (
        DecoupledRolloutStorage,
        DistributedStorage,
        RolloutStorage,
        Storage,
    )
    from jaxroll.types import Minibatch, PolicyOutput, Targets, TimeStep, Transition

__all__ = [
    "DecoupledRolloutStorage",
    "DistributedStorage",
    "Minibatch",
    "PolicyOutput",
    "RolloutStorage",
    "Storage",
    "Targets",
    "TimeStep",
    "Transition",
    "__version__",
    "discounted_returns",
    "gae",
    "lambda_returns",
    "n_step_returns",
    "normalize",
    "retrace",
    "vtrace",
]

_ROOMS = {
    "jaxroll.types": ("Minibatch", "PolicyOutput", "Targets", "TimeStep", "Transition"),
    "jaxroll.estimators": (
        "discounted_returns",
        "gae",
        "lambda_returns",
        "n_step_returns",
        "normalize",
        "retrace",
        "vtrace",
    ),
    "jaxroll.storages": (
        "DecoupledRolloutStorage",
        "DistributedStorage",
        "RolloutStorage",
        "Storage",
    ),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
_SUBMODULES = ("estimators", "minibatches", "spaces", "storages")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"jaxroll.{name}")
    else:
        raise AttributeError(f"module 'jaxroll' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
