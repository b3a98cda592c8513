"""Files of rows: nothing torn or lost by a kill, a full disk or a deleted directory."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path


class LogWarning(UserWarning):
    """Rows that are not where they should be; the run goes on."""


class RowFile:
    """A file that grows at its end. What a full disk does not take waits for the next write.

    A file that is deleted meanwhile, alone or with its directory, is written again with all its
    rows. Python's own buffer would forget what it holds when a write fails.
    """

    def __init__(self, path: Path):
        self.path, self._waiting = path, b""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._open()

    def write(self, data: bytes) -> None:
        """Append; an `OSError` leaves what is missing to the next call."""
        self._waiting += data
        self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        with self._named():
            self._reopen_if_gone()
            while self._waiting:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]

    def sync(self) -> None:
        """Wait until everything is on the disk itself."""
        self.flush()
        with self._named():
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Try once more to write what is left, and close."""
        if self._descriptor >= 0:
            try:
                self.flush()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def replace(self, data: bytes) -> None:
        """Put other data in place of the file's, all or nothing."""
        replace_file(self.path, data)
        self._reopen()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def _reopen(self) -> None:
        old, self._descriptor = self._descriptor, self._open()
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
