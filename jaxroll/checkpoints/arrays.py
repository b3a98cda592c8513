"""The one place that knows orbax: a flat dict of arrays to a directory and back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np


class _Quiet(logging.Filter):
    """Drops what orbax says; its errors reach us as exceptions."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No log lines from orbax meanwhile; everybody else's come through."""
    from absl import logging as absl_logging

    logger, quiet = absl_logging.get_absl_logger(), _Quiet()
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)


def _checkpointer(tag: str) -> Any:
    # Imported when first needed: 0.4 s that a program without checkpoints need not wait for.
    import orbax.checkpoint as ocp

    count = jax.process_count()
    options = ocp.options.MultiprocessingOptions(
        primary_host=0,
        # Named processes meet at the coordinator. Without names orbax would meet on the devices,
        # between the collectives of a training step that runs in another thread.
        active_processes=set(range(count)) if count > 1 else None,
        barrier_sync_key_prefix=tag,
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def write_arrays(directory: Path, arrays: dict[str, Any], tag: str) -> None:
    """Write numpy and (global) jax arrays to a new directory, on all processes together."""
    if not arrays:
        return
    import orbax.checkpoint as ocp

    with _quiet():
        _checkpointer(tag).save(directory.absolute(), args=ocp.args.PyTreeSave(arrays))


def read_arrays(directory: Path, shardings: dict[str, Any], tag: str) -> dict[str, Any]:
    """Read the named arrays: to the devices of a sharding, or as numpy where it is None."""
    if not shardings:
        return {}
    import orbax.checkpoint as ocp

    def restore_args(sharding: Any) -> Any:
        if sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)

    with _quiet():
        return _checkpointer(tag).restore(
            directory.absolute(),
            args=ocp.args.PyTreeRestore(
                item={name: np.zeros(()) for name in shardings},
                restore_args={name: restore_args(s) for name, s in shardings.items()},
                partial_restore=True,
            ),
        )
