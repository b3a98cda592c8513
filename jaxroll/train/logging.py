"""Where the rows of a run go: JSONL, CSV, TensorBoard, or any function of your own.

A row is a dict of numbers with a "step". A logger is called with each row, in order of steps, and
may have a `sync()` and a `close()`. Rows name no device and no mesh: the same run writes the same
rows anywhere.

A kill, a full disk or a deleted directory costs no row. What a disk does not take is kept and
written as soon as that is possible; a `LogWarning` names the file, and the run goes on.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from jaxroll.checks import check_path
from jaxroll.train import options
from jaxroll.train.files import FileLogger, replace_file, warn

Row = Mapping[str, Any]
Logger = Callable[[Row], Any]


class JsonlLogger(FileLogger):
    """One JSON object a line, handed to the operating system as soon as it is logged.

    Args:
      path: the file; its directory is made.
      resume_from_step: None continues the file as it is. A step drops the rows after it, in one
        atomic replacement: pass the step of the checkpoint that the run goes on from, and each
        row is there once in the end. -1 drops all.

    Half a line that a killed process left is removed in either case.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
      >>> with JsonlLogger(path) as log:
      ...     log({"step": 1, "loss": 0.5})
      ...     log({"step": 2, "loss": 0.25})
      >>> with JsonlLogger(path, resume_from_step=1) as log:
      ...     log({"step": 2, "loss": 0.125})
      >>> print(path.read_text().strip())
      {"step": 1, "loss": 0.5}
      {"step": 2, "loss": 0.125}
    """

    def __call__(self, row: Row) -> None:
        """Append a row."""
        # One write for the whole line, so that a reader or a kill sees half a line at most.
        self._waiting += json.dumps(plain_row(row)).encode() + b"\n"
        self.flush()

    def _kept(self, data: bytes, step: int | None) -> bytes:
        rows = _up_to(_parse_jsonl(self.path, data), step)
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


class CsvLogger(FileLogger):
    """Comma-separated values; a name that turns up later becomes a new last column.

    The file is then rewritten once, atomically, with empty cells in the rows before. Empty also
    means None, NaN and ±∞. Arguments as for `JsonlLogger`.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp(), "metrics.csv")
      >>> with CsvLogger(path) as log:
      ...     log({"step": 1, "loss": 0.5})
      ...     log({"step": 2, "loss": 0.25, "eval_episode_return": 21.0})
      >>> print(path.read_text().strip())
      step,loss,eval_episode_return
      1,0.5,
      2,0.25,21.0
    """

    def __init__(self, path: str | os.PathLike[str], resume_from_step: int | None = None):
        self._columns: list[str] = []
        self._rows: list[Row] = []  # those that wait for a column that the disk did not take
        super().__init__(path, resume_from_step)

    def __call__(self, row: Row) -> None:
        """Append a row, first the header or a column where one is missing."""
        self._rows.append(plain_row(row))
        self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        columns = list(dict.fromkeys(itertools.chain(self._columns, *self._rows)))
        if columns != self._columns:
            super().flush()
            _, before = _parse_csv(self.path.read_bytes())
            replace_file(self.path, _csv(columns, before, header=True))
            self._columns = columns
            self._reopen()
        self._waiting += _csv(columns, self._rows)
        self._rows = []
        super().flush()

    def _kept(self, data: bytes, step: int | None) -> bytes:
        self._columns, rows = _parse_csv(data)
        whole = [row for row in rows if None not in (*row, *row.values())]
        if len(whole) < len(rows):
            warn(f"{self.path} has {len(rows) - len(whole)} damaged lines, which are left out.")
        return _csv(self._columns, _up_to(whole, step), header=bool(self._columns))


class TensorBoardLogger(FileLogger):
    """Scalars for TensorBoard, one chart for each name; needs tensorboardX.

    Events are tensorboardX's, but written at once: the thread of its own writer dies when a disk is
    full, and whoever writes next waits for it for ever.

    Args:
      directory: where event files go.
      resume_from_step: charts forget what they showed after this step.
    """

    def __init__(self, directory: str | os.PathLike[str], resume_from_step: int | None = None):
        try:
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        except ImportError as exc:
            raise ImportError(
                "TensorBoardLogger needs tensorboardX. "
                "Install it with: pip install 'jaxroll[tensorboard]'"
            ) from exc
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        super().__init__(check_path("directory", directory) / name, resume_from_step)
        protocol: Any = event_pb2  # its names are made when it is imported
        self._event, self._scalar = protocol.Event, summary.scalar
        self._checksum = record_writer.masked_crc32c
        self._write(self._event(file_version="brain.Event:2"))
        if resume_from_step is not None:
            begun = protocol.SessionLog(status=protocol.SessionLog.START)
            self._write(self._event(step=resume_from_step + 1, session_log=begun))

    def __call__(self, row: Row) -> None:
        """Write each finite number of the row at its step."""
        row = plain_row(row)
        event = self._event(step=int(row.pop("step", None) or 0))
        for name, value in row.items():
            many = isinstance(value, list)
            for i, number in enumerate(value if many else [value]):
                if isinstance(number, float | int):
                    tag = f"{name}/{i}" if many else name
                    event.summary.value.extend(self._scalar(tag, number).value)
        self._write(event)

    def _write(self, event: Any) -> None:
        """Append a record: length, checksum, event, checksum."""
        event.wall_time = time.time()
        data = event.SerializeToString()
        for part in (struct.pack("<Q", len(data)), data):
            self._waiting += part + struct.pack("<I", self._checksum(part))
        self.flush()


class Loggers:
    """Several loggers as one: each row goes to all of them, in order.

    One that cannot write is warned of once for each reason; the others and the run go on.
    """

    def __init__(self, loggers: Iterable[Logger]):
        self.loggers = tuple(loggers)
        self._said: set[str] = set()

    def __call__(self, row: Row) -> None:
        """Hand the row to every logger."""
        for logger in self.loggers:
            self._try(functools.partial(logger, row), _KEPT)

    def sync(self) -> None:
        """Wait until the rows of every logger that has files are on the disk itself."""
        for logger in self.loggers:
            self._try(getattr(logger, "sync", None), _KEPT)

    def close(self) -> None:
        """Close every logger that can be closed, also if one of them fails."""
        with contextlib.ExitStack() as stack:
            for logger in self.loggers:
                stack.callback(self._try, getattr(logger, "close", None), _LOST)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _try(self, action: Callable[[], Any] | None, otherwise: str) -> None:
        try:
            if callable(action):
                action()
        except OSError as error:
            if (text := otherwise.format(error)) not in self._said:
                self._said.add(text)
                warn(text)


_KEPT = (
    "a row of metrics could not be written: {}. The run goes on; the rows are kept and written as "
    "soon as that is possible."
)
_LOST = "rows of metrics are lost: {}. A resume writes those after its checkpoint."
_KINDS: dict[str, tuple[Callable[..., FileLogger], str]] = {
    "jsonl": (JsonlLogger, "metrics.jsonl"),
    "csv": (CsvLogger, "metrics.csv"),
    "tensorboard": (TensorBoardLogger, "tensorboard"),
}


def make_loggers(
    loggers: str | Logger | Iterable[str | Logger] = (),
    directory: str | os.PathLike[str] | None = None,
    *,
    resume_from_step: int | None = None,
) -> Loggers:
    """The loggers of a run, as one.

    Args:
      loggers: names ("jsonl", "csv", "tensorboard"; also "csv,tensorboard") and functions.
      directory: the run's; `metrics.jsonl` is always written there. None: functions only.
      resume_from_step: for files that are continued, the step of the checkpoint.

    Example:
      >>> rows = []
      >>> log = make_loggers(rows.append)
      >>> log({"step": 1, "loss": 0.5})
      >>> rows
      [{'step': 1, 'loss': 0.5}]
    """
    loggers = options.loggers("loggers", loggers)
    names = [name for name in loggers if not callable(name)]
    if names and directory is None:
        raise ValueError(f'logger {names[0]!r} writes a file: give a directory, as "runs/first".')
    made: list[Any] = []
    if directory is not None:
        with contextlib.ExitStack() as stack:  # if one cannot be made, the others are closed
            for kind, file in (_KINDS[name] for name in dict.fromkeys(["jsonl", *names])):
                path = check_path("directory", directory) / file
                made.append(stack.enter_context(kind(path, resume_from_step)))
            stack.pop_all()
    return Loggers([*made, *filter(callable, loggers)])


def plain_row(row: Row) -> dict[str, Any]:
    """A row as Python values: numbers out of arrays, lists out of longer ones, None for NaN and ±∞.

    Example:
      >>> import numpy as np
      >>> plain_row({"step": np.int64(8), "loss": np.float32(0.5), "kl": float("nan")})
      {'step': 8, 'loss': 0.5, 'kl': None}
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"a row must be a dict of numbers with a step, got {row!r}.")
    return {str(name): _plain(value) for name, value in row.items()}


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a JSONL file; half a line at the end, as a killed process leaves it, is left out.

    A line that is damaged elsewhere is left out with a warning.
    """
    return _parse_jsonl(Path(path), Path(path).read_bytes())


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and jax, scalars and arrays
        value = value.tolist()
    if isinstance(value, Mapping):
        return plain_row(value)
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a row holds numbers, strings and None, got {value!r}. Use float(x) or str(x)."
    )


def _parse_jsonl(path: Path, data: bytes) -> list[dict[str, Any]]:
    """The row of each whole line."""
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            rows.append({**json.loads(line)})
        except (ValueError, TypeError) as exc:
            warn(f"{path}, line {number} is damaged ({exc}) and left out.")
    return rows


def _parse_csv(data: bytes) -> tuple[list[str], list[dict[Any, Any]]]:
    """Columns and rows; bytes that are not UTF-8, as damage leaves them, spoil only their cell."""
    reader = csv.DictReader(io.StringIO(data.decode(errors="replace")))
    return list(reader.fieldnames or []), list(reader)


def _csv(columns: list[str], rows: Iterable[Row], header: bool = False) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    for row in rows:
        # A line of the file is a row: that is how half a row is told from a whole one.
        writer.writerow(
            {k: " ".join(v.splitlines()) if isinstance(v, str) else v for k, v in row.items()}
        )
    return text.getvalue().encode(errors="replace")


def _up_to(rows: Iterable[dict[str, Any]], step: int | None) -> list[dict[str, Any]]:
    """Rows with at most this step; one without a step belongs to the row before."""
    kept, current = [], -math.inf
    for row in rows:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            current = float(row["step"])
        if step is None or current <= step:
            kept.append(row)
    return kept
