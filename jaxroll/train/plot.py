"""Learning curves and other columns of runs, with bands over seeds, as PNG, SVG or PDF.

Figures are matplotlib's own objects, made without pyplot: the user's backend is left alone, and
nothing pops up. The palette (Okabe and Ito's) can be told apart by colour-blind readers.
"""

from __future__ import annotations

import io
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxroll.checks import check_choice, check_count, check_path, unknown_name
from jaxroll.train.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Band = Literal["range", "std", "ci"]
_BANDS = {"range": "min–max", "std": "± 1 standard deviation", "ci": "95 % bootstrap interval"}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_TITLES = {"fps": "steps per second", "total_time": "seconds", "step": "steps"}
_NOT_THE_EXPERIMENT = ("seed", "out", "name", "checkpoint_dir", "directory")  # of a config


class Curve(NamedTuple):
    """A column over the steps, its seeds taken together."""

    x: np.ndarray  # [X]
    mean: np.ndarray  # [X]
    low: np.ndarray  # [X]
    high: np.ndarray  # [X]
    num_seeds: int


def plot_runs(
    runs: Any,
    names: str | Sequence[str] | None = None,
    *,
    x: str = "step",
    band: Band | None = "range",
    smooth: int = 1,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """One chart for each name, one line for each run, one band for each run of several seeds.

    Args:
      runs: a History, a run's directory or JSONL file, a list of these, or a dict of
        label → run or list of runs. Runs in an inner list are the seeds of one line, as are the
        values of a "seed" column, and directories whose configs differ in their seed only.
      names: columns; None: episode_return, else the first that is there. "fps" is throughput.
      x: the column along the bottom; "total_time" compares runs by seconds.
      band: what is shaded around the mean over seeds: "range" (min–max), "std", "ci" (95 %
        bootstrap interval of the mean), or None.
      smooth: rows over which each seed's curve is averaged; 1 draws what was measured.
      title: above the charts.
      labels: names of the lines, one for each.
      out: a .png, .svg or .pdf file to write.
      ax: draw one name on these axes instead of a figure of its own.

    Returns:
      The figure; as the last value of a notebook's cell it shows itself.

    Example:
      >>> runs = [History([{"step": s, "loss": (i + 1) / s} for s in (1, 2, 4)]) for i in range(3)]
      >>> figure = plot_runs({"three seeds": runs}, "loss")
      >>> figure.axes[0].get_ylabel()
      'loss'
    """
    check_choice("band", band, (*_BANDS, None))
    check_count("smooth", smooth)
    if out is not None:
        suffix = check_path("out", out).suffix.lower()
        check_choice("the end of out", suffix, (".png", ".svg", ".pdf"))
    lines = _load(runs, labels)
    names = _names(names, x, lines)
    if ax is not None and len(names) > 1:
        raise ValueError(f"ax holds one chart, got {len(names)} names: {', '.join(names)}.")
    figure: Any = _make_figure(len(names)) if ax is None else ax.get_figure(root=True)
    axes = figure.axes if ax is None else [ax]
    num_seeds: set[int] = set()
    for axis, name in zip(axes, names):
        for i, (label, seeds) in enumerate(lines.items()):
            curve = take_together([_series(history, x, name, smooth) for history in seeds], band)
            if curve is not None:
                _draw(axis, curve, i, label, is_shaded=band is not None)
                num_seeds.add(curve.num_seeds)
        _style(axis, x, name)
    if len(lines) > 1:
        drawn = {str(line.get_label()): line for axis in axes for line in axis.lines}
        below = {"loc": "outside lower center", "ncols": min(5, len(drawn))}
        place = below if ax is None else {}
        (ax or figure).legend(drawn.values(), drawn, frameon=False, **place)
    if title is None:
        title = next(iter(lines)) if len(lines) == 1 else ""
    if ax is not None:
        ax.set_title(title or ax.get_title())
    else:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        axes[0].set_title(_note(num_seeds, band, smooth), loc="left", fontsize="small")
    if out is not None:
        _write(figure, Path(out))
    return figure


def take_together(
    seeds: Iterable[tuple[np.ndarray, np.ndarray]], band: Band | None = "range"
) -> Curve | None:
    """The mean and the band of several seeds; None if none of them has a value.

    Each seed is interpolated to the points of all, between its first and its last; where a seed
    has ended, those that go on make the mean.

    Args:
      seeds: (x [X], y [X]) for each, x rising.
      band: as for `plot_runs`.

    Example:
      >>> grid = np.array([0.0, 1.0])
      >>> curve = take_together([(grid, np.array([1.0, 2.0])), (grid, np.array([3.0, 4.0]))])
      >>> curve.mean, curve.low, curve.num_seeds
      (array([2., 3.]), array([1., 2.]), 2)
    """
    seeds = [(x, y) for x, y in seeds if len(x)]
    if not seeds:
        return None
    grid = np.unique(np.concatenate([x for x, _ in seeds]))
    values = np.stack([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in seeds])
    present = ~np.isnan(values).all(axis=0)  # between runs that do not meet there is nothing
    grid, values = grid[present], values[:, present]
    mean = np.nanmean(values, axis=0)
    low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    if band == "std":
        spread = np.nanstd(values, axis=0)
        low, high = mean - spread, mean + spread
    elif band == "ci":  # percentiles of the mean over seeds drawn anew, the same in each call
        count = len(values)
        draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=1000)
        with np.errstate(invalid="ignore"):  # a draw of none but ended seeds is NaN: left out
            means = draws @ np.nan_to_num(values) / (draws @ ~np.isnan(values))
        low, high = np.nanpercentile(means, [2.5, 97.5], axis=0)
    return Curve(grid, mean, low, high, len(values))


def _series(history: History, x: str, name: str, smooth: int) -> tuple[np.ndarray, np.ndarray]:
    if name not in history or x not in history:
        return np.empty(0), np.empty(0)
    xs, ys = history[x], history[name]
    if ys.dtype == object or xs.dtype == object:
        raise TypeError(f"column {name!r} over {x!r} holds no plain numbers, so it has no curve.")
    keep = np.flatnonzero(~(np.isnan(xs) | np.isnan(ys)))
    order = keep[np.argsort(xs[keep], kind="stable")]
    xs, ys = xs[order], ys[order]
    if smooth > 1 and len(ys):
        kernel = np.ones(min(smooth, len(ys)))
        ys = np.convolve(ys, kernel, "same") / np.convolve(np.ones_like(ys), kernel, "same")
    return xs, ys


def _make_figure(num_charts: int) -> Figure:
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """A figure that a notebook shows although pyplot does not know it."""

        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png", dpi=110)
            return data.getvalue()

    columns = min(num_charts, 3 if num_charts != 4 else 2)
    rows = -(-num_charts // columns)
    size = (4.0 + 3.0 * columns, 4.0 if rows == 1 else 3.2 * rows)
    figure = NotebookFigure(figsize=size, layout="constrained")
    for i in range(num_charts):
        figure.add_subplot(rows, columns, i + 1)
    return figure


def _draw(axis: Axes, curve: Curve, i: int, label: str, is_shaded: bool) -> None:
    colour, dash = _COLOURS[i % len(_COLOURS)], _DASHES[i // len(_COLOURS) % len(_DASHES)]
    marker = "o" if len(curve.x) <= 25 else None  # where few, such as evaluations, were measured
    axis.plot(curve.x, curve.mean, dash, label=label, marker=marker, ms=3.5, color=colour)
    if is_shaded and curve.num_seeds > 1:
        axis.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, lw=0)


def _style(axis: Axes, x: str, name: str) -> None:
    from matplotlib.ticker import EngFormatter

    axis.set_xlabel(_TITLES.get(x, x.replace("_", " ")))
    axis.set_ylabel(_TITLES.get(name, name.replace("_", " ")))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#E6E6E6")
    left, right = axis.get_xlim()
    if right - left > right / 100:  # else 1M instead of 1e6 would make all ticks the same
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if name == "fps":
        axis.set_ylim(bottom=0)


def _note(num_seeds: set[int], band: str | None, smooth: int) -> str:
    parts = []
    if max(num_seeds, default=1) > 1:
        ends = sorted({min(num_seeds), max(num_seeds)})
        parts.append(f"mean over {'–'.join(map(str, ends))} seeds")
        parts += [f"band: {_BANDS[band]}"] if band is not None else []
    parts += [f"averaged over {smooth} rows"] if smooth > 1 else []
    return ", ".join(parts)


def _names(names: str | Sequence[str] | None, x: str, lines: dict[str, list[History]]) -> list[str]:
    """The columns to plot, each of which some run has."""
    there = list(dict.fromkeys(n for seeds in lines.values() for h in seeds for n in h.names))
    if not names:
        usual = ("episode_return", "eval_episode_return", *there)
        names = [n for n in usual if n in there and n not in ("step", "seed")][:1]
        if not names:
            raise ValueError("there is nothing to plot: the runs have no rows.")
    names = [names] if isinstance(names, str) else list(names)
    for name in (x, *names):
        if name not in there:
            raise ValueError(unknown_name("column", name, there, "the history"))
    return names


def _write(figure: Figure, path: Path) -> None:
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    # No dates and no random ids: the same data give the same file.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with matplotlib.rc_context({"svg.hashsalt": "jaxroll", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=200, metadata=metadata)


def _load(runs: Any, labels: Sequence[str] | None) -> dict[str, list[History]]:
    """Label → the histories of its seeds, in the order given."""
    groups = runs if isinstance(runs, Mapping) else _by_experiment(_as_list(runs))
    if not groups:
        raise ValueError("there is nothing to plot: no runs were given.")
    there = [str(label) for label in groups]
    if labels is not None and len(labels) != len(there):
        raise ValueError(
            f"labels must name each of the {len(there)} lines ({', '.join(there)}), "
            f"got {len(labels)}."
        )
    return {label: _histories(group) for label, group in zip(labels or there, groups.values())}


def _by_experiment(runs: list[Any]) -> dict[str, list[Any]]:
    """Label → runs; directories whose configs differ in their seed only are together."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for i, run in enumerate(runs):
        groups.setdefault(_experiment(run, str(i)), []).extend(_as_list(run))
    labels = [label for label, _ in groups]
    return {
        label if labels.count(label) == 1 else f"{label}, {group[0]}": group
        for (label, _), group in groups.items()
    }


def _experiment(run: Any, default: str) -> tuple[str, str]:
    """What a run is called, and all of its config that other seeds of it share."""
    if not isinstance(run, str | os.PathLike):
        return f"run {default}", default
    directory = Path(run) if Path(run).is_dir() else Path(run).parent
    name, file = directory.resolve().name, directory / "config.toml"
    if not file.exists():
        return name, default
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ValueError(f"{file} cannot be read: {exc}.") from exc
    what = f"{config.get('agent', '')} {config.get('env', '')}".strip()
    same = {k: v for k, v in config.items() if k not in _NOT_THE_EXPERIMENT}
    return config.get("name") or what or name, json.dumps(same, sort_keys=True, default=str)


def _histories(runs: Any) -> list[History]:
    """Each run as histories of one seed."""
    found = []
    for run in _as_list(runs):
        history = History.read(run) if isinstance(run, str | os.PathLike) else run
        if not isinstance(history, History):
            raise TypeError(
                f"a run is a History, a directory or a JSONL file, got {type(run).__name__}. "
                "Use History(rows) for a list of dicts."
            )
        seeds = list(dict.fromkeys(row.get("seed") for row in history))
        found += [history.select(seed=seed) for seed in seeds] if len(seeds) > 1 else [history]
    return found


def _as_list(runs: Any) -> list[Any]:
    is_one = isinstance(runs, str | os.PathLike | History | Mapping)
    return [runs] if is_one or not isinstance(runs, Iterable) else list(runs)
