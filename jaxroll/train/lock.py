"""One live process for each run directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import weakref
from typing import Any

from jaxroll.checks import check_path
from jaxroll.train.step_files import CheckpointError

_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


class LockedError(CheckpointError):
    """Another live process is using the directory."""


class RunLock:
    """Holds a run directory for this process, until `release` or the process's end.

    The operating system keeps the lock: `kill -9` frees it, so a dead process's lock is simply
    taken over. Several processes of one program: let process 0 take it.

    Args:
      directory: the run's directory; made if it is not there.

    Example:
      >>> import tempfile
      >>> with RunLock(tempfile.mkdtemp()) as lock:
      ...     lock.is_held
      True
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.path = check_path("directory", directory) / ".lock"
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock now."""
        return self._file is not None

    def acquire(self) -> RunLock:
        """Take the lock; `LockedError` names who has it, `CheckpointError` why it cannot be had."""
        if self.is_held:
            return self
        file = -1
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(file)
            if file >= 0:
                os.close(file)
            if isinstance(error, BlockingIOError):
                raise LockedError(
                    f"{self.path.parent} is in use by {owner}. Stop that process, or choose "
                    "another directory."
                ) from None
            raise CheckpointError(
                f"cannot write to the run directory {self.path.parent}: {error}. "
                "Choose another directory, or make it writable."
            ) from error
        self._file = file
        _HELD.add(self)
        text = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.ctime()}
        # On a full disk the lock still holds, only its owner's name is unknown.
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(text).encode(), 0)
        return self

    def renew(self) -> bool:
        """Take the lock again if its file was deleted; whether it was.

        Another process may have taken the directory since, which is a `LockedError`.
        """
        if self._file is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._file)):
                return False
        self.release()
        self.acquire()
        return True

    def release(self) -> None:
        """Give the lock back. The file stays: deleted, it could be locked twice, as two files."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    __enter__ = acquire

    def __exit__(self, *exc: Any) -> None:
        self.release()


def _owner(file: int) -> str:
    try:
        text = json.loads(os.pread(file, 4096, 0))
        return f"process {text['pid']} on {text['host']} since {text['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


# A forked environment worker that outlives its parent must not keep the run locked.
os.register_at_fork(after_in_child=lambda: [lock._close() for lock in list(_HELD)])
