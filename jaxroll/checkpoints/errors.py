"""What can go wrong with a checkpoint, each by its own name."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the cause, if any, is chained."""


class DamagedError(CheckpointError):
    """Files are missing, changed or cut short: what is there is not what was saved."""


class MismatchError(CheckpointError, ValueError):
    """An intact checkpoint holds other leaves, shapes or dtypes than were asked for."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint here."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; `step` says which, `__cause__` why."""

    def __init__(self, message: str, step: int | None = None):
        super().__init__(message)
        self.step = step


class LockedError(CheckpointError):
    """Another live process is using the directory."""


class CheckpointWarning(UserWarning):
    """Something was lost or skipped, and the program goes on."""
