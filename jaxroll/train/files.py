"""Files of rows that survive a full disk: nothing torn, nothing lost, tried again."""

from __future__ import annotations

import os
from pathlib import Path


class Appended:
    """A file that grows at its end; what a full disk does not take waits for the next write.

    Python's own buffer forgets what it holds beyond a few kilobytes when a write fails.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, data: bytes | str) -> None:
        """Append; an `OSError` leaves what is missing to the next call."""
        self._waiting += data.encode() if isinstance(data, str) else data
        self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        while self._waiting:
            written = self._file.write(self._waiting) or 0
            self._waiting = self._waiting[written:]

    def sync(self) -> None:
        """Wait until everything is on the disk itself."""
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more to write what is left, and close."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            self._file.close()


def replace_file(path: Path, text: str) -> None:
    """The whole new file or the whole old one, whatever happens in between."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk needs the room
        raise
