"""The imperative shell around pure agents: dispatch, evaluation, checkpoints, logs, signals."""

import importlib

_HOME = {
    "CsvLogger": "logging",
    "Event": "hooks",
    "History": "history",
    "JsonlLogger": "logging",
    "Loggers": "logging",
    "NonFiniteError": "evaluation",
    "Options": "options",
    "Progress": "progress",
    "TensorBoardLogger": "logging",
    "best_checkpoint": "states",
    "describe": "states",
    "episode_means": "evaluation",
    "evaluate": "evaluation",
    "load": "states",
    "make_loggers": "logging",
    "plot_runs": "plot",
    "save": "states",
    "train": "loop",
}
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'jaxroll.train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxroll.train.{_HOME[name]}"), name)
