"""Where the rows of a run go: JSONL, CSV, TensorBoard, or any function of your own.

A row is a dict of numbers with a "step". A logger is called with each row, in order of steps, and
may have a `close()`. Rows name no device and no mesh: the same run writes the same rows anywhere.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import socket
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxroll.train.files import Appended, replace_file
from jaxroll.train.text import near_matches

Row = Mapping[str, Any]


@runtime_checkable
class Logger(Protocol):
    """Anything that takes a row; a plain function is one."""

    def __call__(self, row: Row, /) -> None:
        """Take one row."""


def plain_row(row: Row) -> dict[str, Any]:
    """A row as Python values: numbers out of arrays, lists out of longer ones, None for NaN and ±∞.

    Example:
      >>> import numpy as np
      >>> plain_row({"step": np.int64(8), "loss": np.float32(0.5), "kl": float("nan")})
      {'step': 8, 'loss': 0.5, 'kl': None}
    """
    return {str(name): _plain(value) for name, value in row.items()}


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a JSONL file; half a line at the end, as a killed process leaves it, is left out.

    A line that is damaged elsewhere is left out with a warning.
    """
    return [row for _, row in _parse_lines(Path(path))]


class JsonlLogger:
    """One JSON object a line, on disk as soon as it is logged.

    Args:
      path: the file; its directory is made.
      resume_from_step: None continues the file as it is. A step drops the rows after it, in one
        atomic replacement: pass the step of the checkpoint that the run goes on from, and each
        row is there once in the end.

    Half a line that a killed process left behind is removed in either case.

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

    def __init__(self, path: str | os.PathLike[str], resume_from_step: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            lines = _up_to(_parse_lines(self.path), resume_from_step)
            text = "".join(f"{line}\n" for line, _ in lines)
            if text.encode() != self.path.read_bytes():
                replace_file(self.path, text)
        self._file = Appended(self.path)

    def __call__(self, row: Row) -> None:
        """Append a row and hand it to the operating system."""
        # One write for the whole line, so that a reader or a kill sees half a line at most.
        self._file.write(json.dumps(plain_row(row), allow_nan=False) + "\n")

    def sync(self) -> None:
        """Wait until the rows are on the disk itself: not even a power cut takes them then."""
        self._file.sync()

    def close(self) -> None:
        """Write what a full disk did not take before, and close the file."""
        self._file.close()

    def __enter__(self) -> JsonlLogger:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class CsvLogger:
    """Comma-separated values; a name that turns up later becomes a new last column.

    The file is then rewritten once, atomically, with empty cells in the rows before. Empty also
    stands for None, NaN and ±∞. Arguments as for `JsonlLogger`.

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
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns: list[str] = []
        self._waiting: list[Row] = []  # rows whose columns the disk had no room for
        if self.path.exists():
            text = self.path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # a killed process leaves half a line
            header, *cells = list(csv.reader(io.StringIO(whole))) or [[]]
            rows = [dict(zip(header, line)) for line in cells if len(line) == len(header)]
            kept = [row for _, row in _up_to([("", row) for row in rows], resume_from_step)]
            self._columns = header
            if (new := _csv(header, kept, header=bool(header))) != text:
                replace_file(self.path, new)
        self._file = Appended(self.path)

    def __call__(self, row: Row) -> None:
        """Append a row, first the header or a column where one is missing."""
        self._waiting.append(plain_row(row))
        self._write()

    def sync(self) -> None:
        """Wait until the rows are on the disk itself."""
        self._write()
        self._file.sync()

    def close(self) -> None:
        """Write what a full disk did not take before, and close the file."""
        try:
            self._write()
        finally:
            self._file.close()

    def __enter__(self) -> CsvLogger:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _write(self) -> None:
        names = dict.fromkeys(name for row in self._waiting for name in row)
        if missing := [name for name in names if name not in self._columns]:
            self._add_columns(missing)
        text, self._waiting = _csv(self._columns, self._waiting), []
        self._file.write(text)

    def _add_columns(self, names: list[str]) -> None:
        """The file with more columns; if that fails, everything is as it was before."""
        self._file.flush()
        with self.path.open(encoding="utf-8", newline="") as file:
            before = list(csv.DictReader(file))
        columns = [*self._columns, *names]
        replace_file(self.path, _csv(columns, before, header=True))
        self._file, old = Appended(self.path), self._file
        old.close()
        self._columns = columns


class TensorBoardLogger:
    """Scalars for TensorBoard, one chart for each name; needs tensorboardX.

    Events are written at once: the thread of tensorboardX's own writer dies when a disk is full,
    and whoever writes next waits for it for ever.

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
        self.path = Path(directory, f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = Appended(self.path)
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
            members = value if isinstance(value, list) else [value]
            for i, number in enumerate(members):
                if isinstance(number, float | int):
                    tag = f"{name}/{i}" if isinstance(value, list) else name
                    event.summary.value.extend(self._scalar(tag, number).value)
        self._write(event)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._file.close()

    def __enter__(self) -> TensorBoardLogger:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _write(self, event: Any) -> None:
        """Append a record: length, checksum, event, checksum."""
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        self._file.write(length + sums[0] + data + sums[1])


class Loggers:
    """Several loggers as one: each row goes to all of them, in order."""

    def __init__(self, loggers: Iterable[Callable[[Row], Any]]):
        self.loggers = tuple(loggers)

    def __call__(self, row: Row) -> None:
        """Hand the row to every logger."""
        for logger in self.loggers:
            logger(row)

    def sync(self) -> None:
        """Wait until the rows of every logger that has files are on the disk itself."""
        for logger in self.loggers:
            if callable(sync := getattr(logger, "sync", None)):
                sync()

    def close(self) -> None:
        """Close every logger that can be closed, also if one of them fails."""
        with contextlib.ExitStack() as stack:
            for logger in self.loggers:
                if callable(close := getattr(logger, "close", None)):
                    stack.callback(close)

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


_KINDS: dict[str, Callable[[Path, int | None], Any]] = {
    "jsonl": lambda directory, step: JsonlLogger(directory / "metrics.jsonl", step),
    "csv": lambda directory, step: CsvLogger(directory / "metrics.csv", step),
    "tensorboard": lambda directory, step: TensorBoardLogger(directory / "tensorboard", step),
}


def make_loggers(
    spec: str | Callable[[Row], Any] | Iterable[str | Callable[[Row], Any]] = (),
    directory: str | os.PathLike[str] | None = None,
    *,
    resume_from_step: int | None = None,
) -> Loggers:
    """The loggers of a run, as one.

    Args:
      spec: names ("jsonl", "csv", "tensorboard"; also "csv,tensorboard") and functions.
      directory: the run's; `metrics.jsonl` is always written there. None: functions only.
      resume_from_step: for files that are continued, the step of the checkpoint.

    Example:
      >>> rows = []
      >>> log = make_loggers(rows.append)
      >>> log({"step": 1, "loss": 0.5})
      >>> rows
      [{'step': 1, 'loss': 0.5}]
    """
    if isinstance(spec, str):
        spec = [name.strip() for name in spec.split(",") if name.strip()]
    elif callable(spec):
        spec = [spec]
    spec = list(spec)
    for item in spec:
        if isinstance(item, str) and item not in _KINDS:
            raise ValueError(
                f"unknown logger {item!r}. {near_matches(item, _KINDS)} "
                "A logger of your own is a function: loggers=[lambda row: print(row)]."
            )
        if not isinstance(item, str) and not callable(item):
            raise TypeError(f"a logger is a name or a function of a row, got {item!r}.")
    names = list(dict.fromkeys(item for item in spec if isinstance(item, str)))
    if directory is None:
        if names:
            raise ValueError(
                f'logger {names[0]!r} writes a file: give a directory, such as "runs/first".'
            )
        return Loggers(item for item in spec if not isinstance(item, str))
    names = ["jsonl", *(name for name in names if name != "jsonl")]
    with contextlib.ExitStack() as stack:  # if one cannot be made, the others are closed
        made = []
        for name in names:
            made.append(_KINDS[name](Path(directory), resume_from_step))
            stack.callback(made[-1].close)
        stack.pop_all()
    return Loggers([*made, *(item for item in spec if not isinstance(item, str))])


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and jax, scalars and arrays
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return plain_row(value)
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(
        f"a row holds numbers, strings and None, got {value!r}. Use float(x) or str(x)."
    )


def _csv(columns: list[str], rows: Iterable[Row], header: bool = False) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    for row in rows:
        # A line of the file is a row: that is how half a row is told from a whole one.
        writer.writerow(
            {k: " ".join(v.splitlines()) if isinstance(v, str) else v for k, v in row.items()}
        )
    return text.getvalue()


def _parse_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(line, row) of each whole line."""
    pieces = path.read_bytes().split(b"\n")
    parsed = []
    for number, piece in enumerate(pieces[:-1], 1):  # what follows the last newline is half a line
        try:
            line = piece.decode()
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            parsed.append((line, row))
        except ValueError as exc:
            if number < len(pieces) - 1:
                warnings.warn(
                    f"{path}, line {number} is damaged ({exc}) and left out.", stacklevel=4
                )
    return parsed


def _up_to(lines: list[tuple[str, Any]], step: int | None) -> list[tuple[str, Any]]:
    """Lines of rows with at most this step; a row without one belongs to the row before."""
    if step is None:
        return lines
    kept, current = [], -math.inf
    for line, row in lines:
        current = float(row["step"]) if row.get("step") not in (None, "") else current
        if current <= step:
            kept.append((line, row))
    return kept
