"""The imperative shell around pure agents: dispatch, evaluation, checkpoints, logs, signals."""

from jaxroll.loop.training import (
    Event,
    NonFiniteError,
    describe,
    episode_means,
    evaluate,
    load,
    save,
    train,
)

__all__ = [
    "Event",
    "NonFiniteError",
    "describe",
    "episode_means",
    "evaluate",
    "load",
    "save",
    "train",
]
