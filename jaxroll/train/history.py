"""The rows of a run, kept tidy: one dict for each logged step, one number for each name."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxroll.checks import check_path, unknown_name
from jaxroll.train.logging import plain_row, read_jsonl
from jaxroll.train.text import format_number


class History:
    """What a run measured, by step.

    Args:
      rows: dicts with a "step"; a name that a row lacks is missing there.

    Example:
      >>> history = History([{"step": 100, "episode_return": 20.0}, {"step": 200, "fps": 1e4}])
      >>> history["episode_return"]
      array([20., nan])
      >>> history.steps
      array([100, 200])
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        self._rows = [plain_row(row) for row in rows]
        self.stopped_by: str | None = None  # why a run ended, where one did
        self.stopped_at: int | None = None  # and at which step
        self.saved_step: int | None = None  # its newest checkpoint then

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> History:
        """The history in a JSONL file, or in the `metrics.jsonl` of a run's directory."""
        path = check_path("path", path)
        file = path / "metrics.jsonl" if path.is_dir() else path
        if not file.exists():
            raise FileNotFoundError(
                f"no history at {file}. Give a JSONL file, or the directory of a run, which "
                "holds a metrics.jsonl."
            )
        return cls(read_jsonl(file))

    @classmethod
    def concat(cls, histories: Iterable[History], **columns: Sequence[Any]) -> History:
        """Several histories as one, told apart by columns.

        Args:
          histories: for instance one for each seed of a sweep.
          **columns: name=values with one value for each history; none given: seed=0, 1, ….

        Example:
          >>> runs = [History([{"step": 1, "loss": x}]) for x in (0.5, 0.25)]
          >>> History.concat(runs, learning_rate=[1e-3, 3e-4]).to_records()[1]
          {'learning_rate': 0.0003, 'step': 1, 'loss': 0.25}
        """
        histories = list(histories) if isinstance(histories, Iterable) else [histories]
        if not all(isinstance(history, History) for history in histories):
            raise TypeError(f"histories must be a list of History, got {histories!r}.")
        named: dict[str, Sequence[Any]] = columns or {"seed": range(len(histories))}
        for name, values in named.items():
            if len(values) != len(histories):
                raise ValueError(
                    f"concat needs one {name} for each of the {len(histories)} histories, "
                    f"got {len(values)}."
                )
        return cls(
            {**{name: values[i] for name, values in named.items()}, **row}
            for i, history in enumerate(histories)
            for row in history
        )

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row; `history.append` is a logger."""
        self._rows.append(plain_row(row))

    @property
    def names(self) -> list[str]:
        """The names of all columns, in the order in which they turned up."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    @property
    def steps(self) -> np.ndarray:
        """[rows] int64."""
        return np.array([row.get("step", -1) for row in self._rows], np.int64)

    def select(self, **equal: Any) -> History:
        """The rows in which each of these columns has this value.

        Example:
          >>> both = History.concat([History([{"step": 1}]), History([{"step": 2}])])
          >>> both.select(seed=1).steps
          array([2])
        """
        return History(r for r in self._rows if all(r.get(k) == v for k, v in equal.items()))

    def last(self, name: str) -> float:
        """The newest value of a column that is not missing; NaN if all are.

        Example:
          >>> History([{"step": 1, "loss": 0.5}, {"step": 2}]).last("loss")
          0.5
        """
        column = self[name]
        column = column[~np.isnan(column)]
        return float(column[-1]) if column.size else float("nan")

    def to_records(self) -> list[dict[str, Any]]:
        """A copy of the rows."""
        return [dict(row) for row in self._rows]

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame."""
        try:
            import pandas
        except ImportError as exc:
            raise ImportError(
                "to_pandas needs pandas. Install it with: pip install pandas, or use "
                "history.to_records(), a list of dicts."
            ) from exc
        return pandas.DataFrame(self._rows, columns=self.names)

    def plot(self, *names: str, ax: Any = None, **options: Any) -> Any:
        """Curves of these columns over the steps, with a band over seeds where there are several.

        Args:
          *names: columns, one chart each; none given: the episode return.
          ax: a matplotlib Axes to draw on, for one name.
          **options: as for `plot_runs`.

        Returns:
          The matplotlib Figure; as the last value of a notebook's cell it shows itself.
        """
        from jaxroll.train.plot import plot_runs

        return plot_runs([self], names or None, ax=ax, **options)

    def __getitem__(self, name: str) -> np.ndarray:
        """[rows] the column as numbers, NaN where missing; strings and lists as objects."""
        if name not in self.names:
            raise KeyError(unknown_name("column", name, self.names, "the history"))
        values = [row.get(name) for row in self._rows]
        if all(value is None or isinstance(value, bool | int | float) for value in values):
            return np.array(values, np.float64)  # None becomes NaN
        column = np.empty(len(values), object)
        column[:] = values
        return column

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_records())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self._rows == other._rows

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in table]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._table()]
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<p>{html.escape(self._title())}</p><table>{table}</table>"

    def _title(self) -> str:
        if not self._rows:
            return "History(empty)"
        size = f"{len(self)} rows × {len(self.names)} columns"
        return f"History({size}, steps {self.steps.min():,} … {self.steps.max():,})"

    def _table(self) -> list[list[str]]:
        """The names, then the first and the last rows; [] if there is none."""
        names, rows = self.names, self._rows
        if len(rows) > 9:
            rows = [*rows[:4], dict.fromkeys(names, "…"), *rows[-4:]]
        return [names, *([_cell(row.get(name)) for name in names] for row in rows)] if rows else []


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return format_number(value)
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)
