"""What a run tells people: metrics, histories, progress, logs and plots.

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
    from jaxroll.reporting.metrics import (
        Last,
        Max,
        Mean,
        Metric,
        Sum,
        all_reduce,
        compute,
        merge,
        reduce,
        zeros_like,
    )
    from jaxroll.reporting.plots import plot_runs
    from jaxroll.reporting.progress import Progress

__all__ = [
    "CsvLogger",
    "History",
    "JsonlLogger",
    "Last",
    "Logger",
    "Loggers",
    "Max",
    "Mean",
    "Metric",
    "Progress",
    "Sum",
    "TensorBoardLogger",
    "all_reduce",
    "compute",
    "make_loggers",
    "merge",
    "plot_runs",
    "reduce",
    "zeros_like",
]

_HOME = {
    **dict.fromkeys(["History"], "history"),
    **dict.fromkeys(
        ["CsvLogger", "JsonlLogger", "Logger", "Loggers", "TensorBoardLogger", "make_loggers"],
        "loggers",
    ),
    **dict.fromkeys(["Last", "Max", "Mean", "Metric", "Sum"], "metrics"),
    **dict.fromkeys(["all_reduce", "compute", "merge", "reduce", "zeros_like"], "metrics"),
    **dict.fromkeys(["plot_runs"], "plots"),
    **dict.fromkeys(["Progress"], "progress"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
