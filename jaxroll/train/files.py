"""A file of rows that no kill, full disk or deleted directory takes a row from."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from jaxroll.checks import check_count, check_path


class LogWarning(UserWarning):
    """Rows that are not where they should be; the run goes on."""


class FileLogger:
    """A file that grows at its end, continues after a resume and closes at the end of `with`.

    What a full disk does not take waits for the next write; Python's own buffer would forget it.
    A file that is deleted meanwhile, alone or with its directory, is written again with all rows.
    """

    def __init__(self, path: str | os.PathLike[str], resume_from_step: int | None = None):
        self.path, self._waiting = check_path("path", path), b""
        if resume_from_step is not None:  # -1 keeps no row
            limits = {"at_least": -1, "below": 2**63}
            resume_from_step = check_count("resume_from_step", resume_from_step, **limits)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            before = self.path.read_bytes()
            whole = before[: before.rfind(b"\n") + 1]  # a killed process leaves half a line
            after = self._kept(whole, resume_from_step)
            if after != before:
                replace_file(self.path, after)
        self._descriptor = -1
        self._reopen()

    def flush(self) -> None:
        """Hand everything to the operating system; an `OSError` leaves what is missing to later."""
        with self._named():
            self._reopen_if_gone()
            while self._waiting:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]

    def sync(self) -> None:
        """Wait until the rows are on the disk itself: not even a power cut takes them then."""
        self.flush()
        with self._named():
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Write what a full disk did not take before, and close the file."""
        if self._descriptor >= 0:
            try:
                self.flush()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _kept(self, data: bytes, step: int | None) -> bytes:
        """Of the file's whole lines, those of rows up to this step."""
        raise NotImplementedError

    def _reopen(self) -> None:
        old, flags = self._descriptor, os.O_RDWR | os.O_APPEND | os.O_CREAT
        self._descriptor = os.open(self.path, flags, 0o666)
        if old >= 0:
            os.close(old)

    def _reopen_if_gone(self) -> None:
        here = os.fstat(self._descriptor)
        try:
            if os.path.samestat(os.stat(self.path), here):
                return
            what = "was replaced by another file while the run wrote it. Rows go on in the new one"
        except FileNotFoundError:
            what = "was deleted while the run wrote it. It is there again, with all its rows"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, os.pread(self._descriptor, here.st_size, 0))
        self._reopen()
        warn(f"{self.path} {what}.")

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise


def replace_file(path: Path, data: bytes) -> None:
    """Write the whole new file or leave the whole old one, whatever happens in between."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # leaves a full disk as it was
        raise


def warn(text: str) -> None:
    """Warn of rows."""
    warnings.warn(text, LogWarning, stacklevel=4)
