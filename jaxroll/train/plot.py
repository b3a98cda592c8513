"""Learning curves and other columns of runs, with bands over seeds, as PNG, SVG or PDF.

Figures are matplotlib's own objects, made without pyplot: the user's backend is left alone, and
nothing pops up. The palette (Okabe and Ito's) can be told apart by colour-blind readers.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxroll.train.history import History
from jaxroll.train.runs import load_curves
from jaxroll.train.text import near_matches

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Band = Literal["range", "std", "ci"]
_BANDS = {"range": "min–max", "std": "± 1 standard deviation", "ci": "95 % bootstrap interval"}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_GREY = "#5A5A5A"
_FORMATS = (".png", ".svg", ".pdf")
_TITLES = {"fps": "steps per second", "total_time": "seconds", "step": "steps"}
_FROM_ZERO = ("fps", "policy_lag")  # small changes of these are not news


class Curve(NamedTuple):
    """A column over the steps, its seeds taken together; leaves [X]."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
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
    _check(band, smooth, out)
    groups = load_curves(runs, labels)
    names = [names] if isinstance(names, str) else names or _default_names(groups)
    for name in names:
        if not any(name in history for seeds in groups.values() for history in seeds):
            known = dict.fromkeys(n for seeds in groups.values() for h in seeds for n in h.names)
            raise ValueError(f"no run has a column {name!r}. {near_matches(name, known)}")
    if ax is not None and len(names) > 1:
        raise ValueError(f"ax holds one chart, got {len(names)} names: {', '.join(names)}.")
    figure, axes = _make_figure(len(names)) if ax is None else (_figure_of(ax), [ax])
    num_seeds: set[int] = set()
    for axis, name in zip(axes, names):
        curves = {
            label: curve
            for label, seeds in groups.items()
            if (curve := take_together([_series(h, x, name, smooth) for h in seeds], band))
        }
        num_seeds |= {curve.num_seeds for curve in curves.values()}
        styles = {label: _style(i) for i, label in enumerate(groups)}
        _draw(axis, curves, styles, shaded=band is not None)
        _dress(axis, x, name)
        if len(groups) > 1 and len(axes) == 1:
            _label_lines(axis, curves, styles)
    if len(groups) > 1 and len(axes) > 1:
        _legend(figure, groups, {label: _style(i) for i, label in enumerate(groups)})
    if title is None and len(groups) == 1:
        title = next(iter(groups)) or None
    note = _note(num_seeds, band, smooth)
    if ax is None:
        _head(figure, title, note)
    elif title:
        ax.set_title(title)
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
    if band == "std":
        spread = np.nanstd(values, axis=0)
        low, high = mean - spread, mean + spread
    elif band == "ci" and len(values) > 1:
        low, high = _bootstrap(values, mean)
    else:
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    return Curve(grid, mean, low, high, len(values))


def _bootstrap(values: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Percentiles of the mean over seeds drawn anew 1000 times, the same draws in each call."""
    draws = np.random.default_rng(0).multinomial(
        len(values), np.full(len(values), 1 / len(values)), size=1000
    )
    weights = draws.astype(np.float64)
    total = weights @ np.nan_to_num(values)
    count = weights @ (~np.isnan(values)).astype(np.float64)
    # A draw of none but ended seeds says nothing; the mean stands in.
    means = np.where(count > 0, total / np.maximum(count, 1), mean[None, :])
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return low, high


def _series(history: History, x: str, name: str, smooth: int) -> tuple[np.ndarray, np.ndarray]:
    if name not in history or x not in history:
        return np.empty(0), np.empty(0)
    xs, ys = history[x], history[name]
    if ys.dtype == object or xs.dtype == object:
        raise TypeError(f"column {name!r} over {x!r} holds no plain numbers, so it has no curve.")
    keep = ~(np.isnan(xs) | np.isnan(ys))
    xs, ys = xs[keep], ys[keep]
    order = np.argsort(xs, kind="stable")
    xs, ys = xs[order], ys[order]
    if smooth > 1 and len(ys):
        kernel = np.ones(min(smooth, len(ys)))
        ys = np.convolve(ys, kernel, "same") / np.convolve(np.ones_like(ys), kernel, "same")
    return xs, ys


def _make_figure(num_charts: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """A figure that a notebook shows although pyplot never heard of it."""

        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png", dpi=110)
            return data.getvalue()

    columns = min(num_charts, 3 if num_charts != 4 else 2)
    rows = -(-num_charts // columns)
    width = {1: 7.0, 2: 10.0, 3: 13.0}[columns]
    figure = NotebookFigure(figsize=(width, 4.0 if rows == 1 else 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in grid[num_charts:]:
        unused.remove()
    return figure, grid[:num_charts]


def _figure_of(axis: Axes) -> Figure:
    figure = axis.get_figure(root=True)  # axes in a subfigure belong to the whole one
    if figure is None:
        raise ValueError("ax belongs to no figure any more. Make it with figure.subplots().")
    return figure


def _draw(axis: Axes, curves: Mapping[str, Curve], styles: Mapping[str, Any], shaded: bool) -> None:
    for label, curve in curves.items():
        style = styles[label]
        # Few points, such as evaluations, are marked where they were measured.
        marker = "o" if len(curve.x) <= 25 else None
        axis.plot(curve.x, curve.mean, label=label, marker=marker, ms=3.5, lw=1.8, **style)
        if shaded and curve.num_seeds > 1:
            axis.fill_between(
                curve.x, curve.low, curve.high, color=style["color"], alpha=0.18, lw=0
            )


def _dress(axis: Axes, x: str, name: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

    axis.set_xlabel(_TITLES.get(x, x.replace("_", " ")))
    axis.set_ylabel(_TITLES.get(name, name.replace("_", " ")))
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#B0B0B0")
    axis.tick_params(color="#B0B0B0", labelcolor=_GREY)
    axis.xaxis.label.set_color(_GREY)
    axis.yaxis.label.set_color(_GREY)
    axis.grid(color="#E6E6E6", lw=0.8)
    axis.set_axisbelow(True)
    axis.margins(x=0.01)
    left, right = axis.get_xlim()
    if right - left > right / 100:  # else the letters would hide what tells ticks apart
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 1M instead of 1e6
    else:
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if 0 < left < 0.2 * right:  # a run that starts at the start, not a part of one
        axis.set_xlim(left=0)
    if name in _FROM_ZERO and axis.get_ylim()[0] >= 0:
        axis.set_ylim(bottom=0)


def _label_lines(axis: Axes, curves: Mapping[str, Curve], styles: Mapping[str, Any]) -> None:
    """Names at the ends of the lines where all end together, else a legend."""
    low, high = axis.get_xlim()
    together = all(curve.x[-1] > high - 0.06 * (high - low) for curve in curves.values())
    if not together or len(curves) > 8:
        axis.legend(frameon=False, fontsize=9)
        return
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top)
    ends = {label: (curve.mean[-1] - bottom) / (top - bottom) for label, curve in curves.items()}
    for label, height in zip(ends, _apart(list(ends.values()), gap=0.065)):
        axis.annotate(
            label,
            (1.01, height),
            xycoords="axes fraction",
            color=styles[label]["color"],
            fontsize=9.5,
            va="center",
        )


def _apart(heights: list[float], gap: float) -> list[float]:
    """The heights, moved as little as needed to keep `gap` between neighbours, within 0 … 1.

    Example:
      >>> [round(h, 3) for h in _apart([0.5, 0.52, 0.9], 0.1)]
      [0.46, 0.56, 0.9]
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    # Less `gap` for each one below, the wishes need only not fall: a rising fit in least squares.
    blocks: list[tuple[float, int]] = []  # (mean wish, members)
    for rank, i in enumerate(order):
        blocks.append((heights[i] - gap * rank, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, m), (high, n) = blocks[-2:]
            blocks[-2:] = [((low * m + high * n) / (m + n), m + n)]
    fitted = np.repeat([mean for mean, _ in blocks], [n for _, n in blocks])
    fitted = np.clip(fitted, 0.0, max(0.0, 1.0 - gap * (len(heights) - 1)))
    placed = np.empty(len(heights))
    placed[order] = fitted + gap * np.arange(len(heights))
    return placed.tolist()


def _legend(figure: Figure, groups: Iterable[str], styles: Mapping[str, Any]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], lw=2, **styles[label]) for label in groups]
    figure.legend(
        handles,
        list(groups),
        loc="outside lower center",
        ncols=min(5, len(handles)),
        frameon=False,
        fontsize=9.5,
    )


def _head(figure: Figure, title: str | None, note: str) -> None:
    """The title at the left, and under it, small, what lines and bands are."""
    if not (title or note):
        return
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    if note:
        first = figure.axes[0]
        first.set_title(note, loc="left", fontsize=9, color=_GREY)


def _note(num_seeds: set[int], band: str | None, smooth: int) -> str:
    parts = []
    if max(num_seeds, default=1) > 1:
        least, most = min(num_seeds), max(num_seeds)
        parts.append(f"mean over {most if least == most else f'{least}–{most}'} seeds")
        if band is not None:
            parts.append(f"band: {_BANDS[band]}")
    if smooth > 1:
        parts.append(f"averaged over {smooth} rows")
    return ", ".join(parts)


def _style(i: int) -> dict[str, Any]:
    dash = _DASHES[i // len(_COLOURS) % len(_DASHES)]
    return {"color": _COLOURS[i % len(_COLOURS)], "ls": dash}


def _default_names(groups: Mapping[str, Sequence[History]]) -> list[str]:
    there = list(dict.fromkeys(n for seeds in groups.values() for h in seeds for n in h.names))
    wished = ("episode_return", "eval_episode_return")
    others = [name for name in there if name not in ("step", "seed")]
    for name in (*wished, *others):
        if name in there:
            return [name]
    raise ValueError("there is nothing to plot: the runs have no rows.")


def _check(band: Any, smooth: Any, out: Any) -> None:
    if band is not None and band not in _BANDS:
        raise ValueError(
            f"band must be {', '.join(_BANDS)} or None, got {band!r}. "
            + near_matches(str(band), _BANDS)
        )
    if smooth < 1:
        raise ValueError(f"smooth is a number of rows, ≥ 1, got {smooth}. Use 1 for none.")
    if out is not None and Path(out).suffix.lower() not in _FORMATS:
        raise ValueError(f"out must end in {', '.join(_FORMATS)}, got {os.fspath(out)!r}.")


def _write(figure: Figure, path: Path) -> None:
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    # No dates and no random ids: the same data give the same file.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with matplotlib.rc_context({"svg.hashsalt": "jaxroll", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=200, metadata=metadata)
