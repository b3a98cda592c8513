"""The imperative shell around pure agents: dispatch, evaluation, checkpoints, logs, signals."""

from jaxroll.loop.evaluation import episode_means, evaluate
from jaxroll.loop.states import best_checkpoint, describe, load, save
from jaxroll.loop.training import Event, NonFiniteError, train

__all__ = [
    "Event",
    "NonFiniteError",
    "best_checkpoint",
    "describe",
    "episode_means",
    "evaluate",
    "load",
    "save",
    "train",
]
