"""Before the first device is touched: processes, CPU devices, the cache of compiled programs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import jax

from jaxroll import parallel


def start(
    *,
    devices: int | None = None,
    cache: bool = True,
    distributed: bool = False,
    **processes: Any,
) -> None:
    """Set JAX up.

    Args:
      devices: on CPU, make so many (in each process).
      cache: keep compiled programs on disk, and use those that are there.
      distributed: whether this is one of several processes, which JAX may find.
      **processes: as for `parallel.initialize`; any that is not None means `distributed`.
    """
    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not cache:
        jax.config.update("jax_enable_compilation_cache", False)  # also one of the environment's
    elif not chosen:  # not by JAX_COMPILATION_CACHE_DIR
        jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if devices is not None:
        with contextlib.suppress(RuntimeError):  # if a backend runs already, make_mesh counts
            jax.config.update("jax_num_cpu_devices", devices)
    if distributed or any(x is not None for x in processes.values()):
        parallel.initialize(**processes)


def cache_directory() -> Path:
    """Where compiled programs are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxroll" / "xla"
