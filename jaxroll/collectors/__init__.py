"""Collectors: what drives an environment with a policy, for training and for evaluation."""

from jaxroll.collectors.callback import CallbackEnv
from jaxroll.collectors.evaluate import EvaluationResult, evaluate, evaluate_host
from jaxroll.collectors.host import HostCollector
from jaxroll.collectors.rollout import collect, init_actor

__all__ = [
    "CallbackEnv",
    "EvaluationResult",
    "HostCollector",
    "collect",
    "evaluate",
    "evaluate_host",
    "init_actor",
]
