"""Which lines a chart has: histories, files and directories, sorted into runs and their seeds."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxroll.train.history import History

_NOT_THE_EXPERIMENT = {"seed", "out", "name", "checkpoint_dir", "directory"}


def load_curves(runs: Any, labels: Sequence[str] | None = None) -> dict[str, list[History]]:
    """Label → the histories of its seeds.

    Args:
      runs: as for `plot_runs`.
      labels: other names, one for each line.

    Example:
      >>> one = History([{"step": 1}])
      >>> {label: len(seeds) for label, seeds in load_curves({"a": [one, one], "b": one}).items()}
      {'a': 2, 'b': 1}
    """
    if isinstance(runs, Mapping):
        groups = {str(label): _histories(run) for label, run in runs.items()}
    else:
        groups = _group(_as_list(runs))
    if not groups:
        raise ValueError("there is nothing to plot: no runs were given.")
    if labels is not None:
        if len(labels) != len(groups):
            raise ValueError(
                f"labels must name each of the {len(groups)} lines ({', '.join(groups)}), "
                f"got {len(labels)}."
            )
        groups = dict(zip(labels, groups.values()))
    return groups


def _group(runs: list[Any]) -> dict[str, list[History]]:
    """Lines in the order given; directories of one experiment, seeds aside, share a line."""
    lines: dict[str, tuple[str, str, list[History]]] = {}  # experiment → label, own name, seeds
    for i, run in enumerate(runs):
        experiment, label, own_name = str(i), "", f"run {i}"
        if isinstance(run, str | os.PathLike):
            directory = Path(run) if Path(run).is_dir() else Path(run).parent
            own_name = directory.resolve().name
            if config := _read_config(directory):
                experiment = json.dumps(_without_seed(config), sort_keys=True, default=str)
                parts = [config.get("name")] if config.get("name") else []
                parts = parts or [config.get("agent"), config.get("env")]
                label = " ".join(part for part in parts if isinstance(part, str))
        lines.setdefault(experiment, (label or own_name, own_name, []))[2].extend(_histories(run))
    taken = [label for label, _, _ in lines.values()]
    groups: dict[str, list[History]] = {}
    for label, own_name, seeds in lines.values():
        name = label if taken.count(label) == 1 else f"{label}, {own_name}"
        while name in groups:
            name += "′"
        groups[name] = seeds
    return groups


def _histories(runs: Any) -> list[History]:
    """Each run as histories of one seed."""
    found = []
    for run in _as_list(runs):
        if isinstance(run, str | os.PathLike):
            run = History.read(run)
        if not isinstance(run, History):
            raise TypeError(
                f"a run is a History, a directory or a JSONL file, got {type(run).__name__}. "
                "Use History(rows) for a list of dicts."
            )
        seeds = list(dict.fromkeys(row.get("seed") for row in run))
        found += [run.select(seed=seed) for seed in seeds] if len(seeds) > 1 else [run]
    return found


def _as_list(runs: Any) -> list[Any]:
    is_one = isinstance(runs, str | os.PathLike | History | Mapping)
    return [runs] if is_one or not isinstance(runs, Iterable) else list(runs)


def _read_config(directory: Path) -> dict[str, Any]:
    """The config of a run's directory; {} if there is none."""
    file = directory / "config.toml"
    if not file.exists():
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ValueError(f"{file} cannot be read: {exc}.") from exc


def _without_seed(config: Any) -> Any:
    if isinstance(config, Mapping):
        return {k: _without_seed(v) for k, v in config.items() if k not in _NOT_THE_EXPERIMENT}
    return config
