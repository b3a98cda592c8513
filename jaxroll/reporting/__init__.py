"""What a run tells people: histories, progress, logs and plots.

Knows pytrees and dicts of numbers, nothing of what they mean. Names load when they are first
used: a progress bar needs no jax, a log file neither matplotlib nor rich.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxroll.reporting.history import History
    from jaxroll.reporting.loggers import (
        CsvLogger,
        JsonlLogger,
        Logger,
        Loggers,
        TensorBoardLogger,
        make_loggers,
    )
    from jaxroll.reporting.plots import plot_runs
    from jaxroll.reporting.progress import Progress

__all__ = [
    "CsvLogger",
    "History",
    "JsonlLogger",
    "Logger",
    "Loggers",
    "Progress",
    "TensorBoardLogger",
    "make_loggers",
    "plot_runs",
]

_HOME = {
    **dict.fromkeys(["History"], "history"),
    **dict.fromkeys(
        ["CsvLogger", "JsonlLogger", "Logger", "Loggers", "TensorBoardLogger", "make_loggers"],
        "loggers",
    ),
    **dict.fromkeys(["plot_runs"], "plots"),
    **dict.fromkeys(["Progress"], "progress"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
