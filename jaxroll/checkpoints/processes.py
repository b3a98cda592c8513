"""Acting together: several processes of one `jax.distributed` program, or just one.

Talks through the coordinator's key-value store and never through devices, so that it may run
in a thread beside a training step that has collectives of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax

from jaxroll.checkpoints.errors import CheckpointError

TIMEOUT_SECONDS = 600  # longer than the barriers inside orbax (300 s), so that those report first


def is_primary() -> bool:
    """Whether this is process 0, which alone writes manifests, renames and deletes."""
    return jax.process_index() == 0


def together(tag: str, action: Callable[[], Any], *, primary_only: bool = False) -> Any:
    """Run an action on every process, or on process 0: it succeeds for all or raises for all.

    Args:
      tag: names this call; the same on all processes, and used once.
      action: what to do. Its result must be JSON where others need it.
      primary_only: act on process 0 only, the others wait.

    Returns:
      the action's result on process 0.

    Example:
      >>> together("example", lambda: 3)
      3
    """
    if jax.process_count() == 1:
        return action()
    from orbax.checkpoint import multihost

    client = multihost.get_jax_distributed_client()
    rank, failure, result = jax.process_index(), None, None
    if not primary_only or rank == 0:
        try:
            result = action()
        except Exception as error:
            failure = error
    text = f"{type(failure).__name__}: {failure}" if failure else None
    shared = result if primary_only else None  # what every process has need not travel
    client.key_value_set(f"jaxroll/{tag}/{rank}", json.dumps([text, shared]))
    others = [
        json.loads(client.blocking_key_value_get(f"jaxroll/{tag}/{i}", TIMEOUT_SECONDS * 1000))
        for i in range(jax.process_count())
    ]
    if failure is not None:
        raise failure
    for i, (text, _) in enumerate(others):
        if text is not None:
            raise CheckpointError(f"process {i} failed: {text}")
    return others[0][1] if primary_only else result
