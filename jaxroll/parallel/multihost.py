"""Several processes and hosts, by JAX's own multi-controller runtime.

Every process runs the same program on a global mesh; `initialize` comes before anything touches a
device. Logs and metadata come from process 0, checkpoints are written by all together.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxroll.checks import check_count
from jaxroll.parallel.mesh import ACTORS
from jaxroll.types import PyTree

PEER_LOST = 75  # exit code of a process whose peer is gone: EX_TEMPFAIL, restart to go on
# Statuses by which the runtime says that a peer does not answer, whatever the text.
_LOST_STATUS = ("UNAVAILABLE:", "DEADLINE_EXCEEDED:")
# Where a dispatch fails at once, the runtime's status comes as a ValueError.
_STATUS = re.compile(r"\s*[A-Z_]+: ")
# What Gloo, NCCL and the coordination service say when a connection breaks, under any status.
_LOST_TEXT = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost|timed out)|\bby peer|heartbeat|"
    r"(socket|pipe) closed|broken pipe|timed out waiting|connectfullmesh|remote process|"
    r"network error|unhealthy|coordination service",
    re.IGNORECASE,
)


class PeerLostError(RuntimeError):
    """Another process of the run is gone; start all of them again from the last checkpoint."""


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout: int | None = None,
) -> None:
    """Join the processes of one run; call it before anything else of JAX.

    Args:
      coordinator: "host:port" of process 0; None: found by JAX (Slurm, MPI, TPU pods).
      num_processes: how many there are.
      process_id: which one this is, from 0.
      heartbeat_timeout: seconds after which a silent peer counts as gone; None: 100 where JAX finds
        the processes, for a pod's network may pause, and 10 where a coordinator is given. A peer
        that ends is noticed at once.
    """
    given = (coordinator, num_processes, process_id)
    if any(x is not None for x in given) and any(x is None for x in given):
        raise ValueError(
            "give coordinator, num_processes and process_id together, or none of them where JAX "
            f"finds them itself; got coordinator={coordinator!r}, num_processes={num_processes}, "
            f"process_id={process_id}."
        )
    if process_id is not None and num_processes is not None and not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id must be from 0 to num_processes - 1 = {num_processes - 1}, got "
            f"{process_id}."
        )
    if heartbeat_timeout is None:
        heartbeat_timeout = 100 if coordinator is None else 10
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=num_processes,
            process_id=process_id,
            heartbeat_timeout_seconds=check_count("heartbeat_timeout", heartbeat_timeout),
        )
    except ValueError as error:
        if coordinator is not None:
            raise
        raise ValueError(
            f"JAX found no Slurm, MPI or TPU pod around this process ({error}). Start it there, by "
            "srun or mpirun, or give coordinator (host:port), num_processes and process_id."
        ) from error


def process_max(number: int) -> int:
    """The largest of the processes' numbers: what all of them learn, to do the same at one step."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.asarray(number, np.int32))))


@contextlib.contextmanager
def peer_guard(*, own_process: bool = False) -> Iterator[None]:
    """While entered, the failure of a collective step says that a peer is gone.

    Args:
      own_process: whether the process is ours to end: it then leaves with `PEER_LOST` at once. An
        ordinary exit would wait for the lost peer at the runtime's last barrier, and abort.

    Raises:
      PeerLostError: instead of the runtime's error, where the process is not ours.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1 or not is_peer_lost(error):
            raise
        text = (
            f"process {jax.process_index()}: another process of this run is gone. Start all of "
            "them again with resume=True (jaxroll resume RUN): the run goes on from its last "
            "checkpoint."
        )
        if not own_process:
            raise PeerLostError(text) from error
        print(f"jaxroll: {text}", file=sys.stderr)
        with contextlib.suppress(Exception):  # a closed pipe must not keep us
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(PEER_LOST)


def is_peer_lost(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is the runtime's report of a lost peer.

    Example:
      >>> is_peer_lost(jax.errors.JaxRuntimeError("UNKNOWN: Gloo: Connection closed by peer"))
      True
      >>> is_peer_lost(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
      False
    """
    while error is not None:
        text = str(error)
        from_runtime = isinstance(error, jax.errors.JaxRuntimeError) or (
            isinstance(error, ValueError) and _STATUS.match(text)
        )
        # A traceback is that of a Python callback: connections in it are the environment's own.
        from_runtime = from_runtime and "Traceback (most recent call last)" not in text
        if from_runtime and (text.lstrip().startswith(_LOST_STATUS) or _LOST_TEXT.search(text)):
            return True
        error = error.__cause__ or error.__context__
    return False


def local(tree: PyTree) -> PyTree:
    """Replicated arrays of a mesh as ordinary ones of this process's first device."""

    def take(x: Any) -> Any:
        if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
            return x.addressable_data(0)
        return x

    return jax.tree.map(take, tree)


def local_mesh(tree: PyTree) -> Mesh | None:
    """The devices of this process that hold the tree, if they are several."""
    leaf = jax.tree.leaves(tree)[0]
    devices = sorted(leaf.sharding.addressable_devices, key=lambda d: d.id)
    return Mesh(np.array(devices), (ACTORS,)) if len(devices) > 1 else None
