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
        groups = {str(k): _histories(v if _is_several(v) else [v]) for k, v in runs.items()}
    else:
        groups = _group(runs if _is_several(runs) else [runs])
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


def read_config(directory: Path) -> dict[str, Any]:
    """The config of a run's directory (config.toml, else config.json); {} if there is none."""
    for name, parse in (("config.toml", tomllib.loads), ("config.json", json.loads)):
        file = directory / name
        if file.exists():
            try:
                config = parse(file.read_text(encoding="utf-8"))
            except ValueError as exc:
                raise ValueError(f"{file} cannot be read: {exc}.") from exc
            return config if isinstance(config, dict) else {}
    return {}


def _group(runs: Iterable[Any]) -> dict[str, list[History]]:
    """Lines in the order given; directories of one experiment, seeds aside, share a line."""
    lines: list[tuple[str, str, list[History]]] = []  # (label, name if the label is taken, seeds)
    experiments: dict[str, int] = {}
    for i, run in enumerate(runs):
        if isinstance(run, str | os.PathLike):
            path = Path(run)
            config = read_config(path if path.is_dir() else path.parent)
            here = path.resolve()
            own_name = (here if path.is_dir() else here.parent).name
            experiment = json.dumps(_without_seed(config), sort_keys=True, default=str)
            if config and experiment in experiments:
                lines[experiments[experiment]][2].extend(_histories([path]))
                continue
            experiments[experiment] = len(lines)
            lines.append((_config_label(config) or own_name, own_name, _histories([path])))
        else:
            lines.append(("", f"run {i}", _histories(run if _is_several(run) else [run])))
    taken = [label for label, _, _ in lines]
    groups: dict[str, list[History]] = {}
    for label, own_name, seeds in lines:
        name = (
            label if taken.count(label) == 1 else own_name if not label else f"{label}, {own_name}"
        )
        while name in groups:
            name += "′"
        groups[name] = seeds
    return groups


def _histories(runs: Iterable[Any]) -> list[History]:
    """Each run as histories of one seed."""
    found = []
    for run in runs:
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


def _is_several(runs: Any) -> bool:
    return not isinstance(runs, str | os.PathLike | History | Mapping) and isinstance(
        runs, Iterable
    )


def _config_label(config: Mapping[str, Any]) -> str:
    if isinstance(name := config.get("name"), str) and name:
        return name
    parts = (config.get("agent"), config.get("env"))
    return " ".join(part for part in parts if isinstance(part, str))


def _without_seed(config: Any) -> Any:
    if isinstance(config, Mapping):
        return {k: _without_seed(v) for k, v in config.items() if k not in _NOT_THE_EXPERIMENT}
    return config
