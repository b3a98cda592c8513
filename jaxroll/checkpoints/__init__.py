"""Save and restore any pytree with its metadata, verified.

Arrays and JSON only: reading a stranger's checkpoint runs no code of theirs. Every file is checked
against its SHA-256 before it is used, and every leaf against the shape and dtype asked for.
"""

from jaxroll.checkpoints.checkpointer import Checkpointer, Restored
from jaxroll.checkpoints.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedError,
    LockedError,
    MismatchError,
    NoCheckpointError,
    SaveError,
)
from jaxroll.checkpoints.lock import RunLock
from jaxroll.checkpoints.single import load_pytree, save_pytree

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Checkpointer",
    "DamagedError",
    "LockedError",
    "MismatchError",
    "NoCheckpointError",
    "Restored",
    "RunLock",
    "SaveError",
    "load_pytree",
    "save_pytree",
]
