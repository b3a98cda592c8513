"""Arrays in a directory, by orbax: written whole or not at all, on all processes together.

Orbax's errors reach the caller as exceptions; its log lines and late reports reach nobody.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np


def write_arrays(
    directory: Path, arrays: dict[str, Any], tag: str, before_rename: Callable[[Path], None]
) -> None:
    """Write a new directory, which appears when it is complete.

    Args:
      directory: must not exist.
      arrays: by name.
      tag: names this call; the same on all processes, and used once.
      before_rename: called on process 0 with the complete, temporary directory.
    """
    import orbax.checkpoint as ocp

    with _orbax(tag) as checkpointer:
        finish = checkpointer.handler.finalize  # called just before the rename, on process 0

        def finalize(path: Any) -> None:
            finish(path)
            before_rename(Path(path))

        checkpointer.handler.finalize = finalize
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(arrays))


def read_arrays(directory: Path, wanted: dict[str, tuple[Any, Any]], tag: str) -> dict[str, Any]:
    """By name: (form, sharding) to the array, on the devices or as numpy where it is None."""
    import orbax.checkpoint as ocp

    def restore_args(sharding: Any) -> Any:
        if sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)

    with _orbax(tag) as checkpointer:
        found = checkpointer.handler.metadata(directory.absolute()).tree
        for name, (form, _) in wanted.items():
            array = found[name]
            # A resealed file can declare an array, or a chunk, of any size.
            too_large = any(c > n for c, n in zip(array.storage.chunk_shape, form.shape))
            if too_large or (array.shape, array.dtype) != (form.shape, form.dtype):
                raise ValueError(
                    f"{name} is {array.dtype}{list(array.shape)} in chunks of "
                    f"{list(array.storage.chunk_shape)}, which is not what its manifest says: "
                    f"{form.dtype}{list(form.shape)}"
                )
        return checkpointer.restore(
            directory.absolute(),
            args=ocp.args.PyTreeRestore(
                item={name: np.zeros(()) for name in wanted},
                restore_args={name: restore_args(s) for name, (_, s) in wanted.items()},
                partial_restore=True,
            ),
        )


@contextlib.contextmanager
def _orbax(tag: str) -> Iterator[Any]:
    """A checkpointer without log lines; its errors reach us as exceptions."""
    # Imported when first needed: 0.4 s that a program without checkpoints need not wait for.
    import orbax.checkpoint as ocp
    from absl import logging as absl_logging

    count = jax.process_count()
    options = ocp.options.MultiprocessingOptions(
        primary_host=0,
        # Named processes meet at the coordinator. Without names orbax would meet on the devices,
        # between the collectives of a training step that runs in another thread.
        active_processes=set(range(count)) if count > 1 else None,
        barrier_sync_key_prefix=tag,
    )

    def keep(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    _drop_late_reports()
    logger = absl_logging.get_absl_logger()
    logger.addFilter(keep)
    try:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, multiprocessing_options=options)
        yield ocp.Checkpointer(handler, multiprocessing_options=options)
    finally:
        logger.removeFilter(keep)


@functools.cache
def _drop_late_reports() -> None:
    # When a write fails, orbax raises its error and closes its event loop; tensorstore then reports
    # every further failed write to the closed loop, a traceback each, at any later moment.
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = hook
