"""One tree in one directory: the same verified format as a run's steps, without the run."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from jaxroll.checkpoints import manifest
from jaxroll.checkpoints.checkpointer import Checkpointer
from jaxroll.checkpoints.processes import together
from jaxroll.checkpoints.steps import (
    DELETING,
    find,
    metadata_of,
    read_step,
    remove,
    take_snapshot,
    write_step,
)
from jaxroll.types import PyTree

_TAGS = itertools.count()


def save_pytree(
    path: str | os.PathLike[str],
    tree: PyTree,
    metadata: dict[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a tree of arrays and its metadata to a new directory; back when it is on the disk.

    Args:
      path: must not exist, unless `overwrite`; the old one goes when the new one is complete.
      tree: any pytree of arrays, typed keys and Python numbers.
      metadata: what JSON can hold; `load_pytree` gives it back.

    Example:
      >>> import tempfile, numpy as np
      >>> path = tempfile.mkdtemp() + "/params"
      >>> save_pytree(path, {"w": np.arange(3)}, {"network": "mlp"})
      >>> load_pytree(path, {"w": np.zeros(3, int)})
      ({'w': array([0, 1, 2])}, {'network': 'mlp'})
    """
    path = Path(path)
    tag = f"single/{next(_TAGS)}"

    def check() -> None:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists. Choose another path, or pass overwrite=True.")
        if path.exists() and not (path / manifest.NAME).is_file():
            raise FileExistsError(f"{path} is no checkpoint, so it is not overwritten. Remove it.")

    together(f"{tag}/check", check, primary_only=True)
    write_step(path, take_snapshot(0, tree, metadata or {}, {}), tag)
    together(
        f"{tag}/clean", lambda: remove(path.with_name(path.name + DELETING)), primary_only=True
    )


def load_pytree(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    subtree: str = "",
    shardings: PyTree = None,
) -> tuple[PyTree, dict[str, Any]]:
    """The tree and the metadata at a path, verified; a mismatch names leaves and shapes.

    Args:
      path: a directory of `save_pytree`, one step of a run, or a run's checkpoint directory
        (its newest intact step is taken).
      like: a tree of the same structure, of arrays or `jax.ShapeDtypeStruct`s.
      subtree: take only what is saved below this path, for instance "shared/params".
      shardings: where leaves go; see `Checkpointer.restore`.

    Returns:
      the tree, and the metadata (of a run's step: its config).
    """
    path = find(Path(path))
    if not (path / manifest.NAME).is_file() and (run := Checkpointer(path)).steps():
        _, tree, metadata = run.restore_subtree(like, subtree, shardings=shardings)
        return tree, metadata["config"]
    tag = f"single/{next(_TAGS)}"
    together(f"{tag}/verify", lambda: manifest.verify(path, manifest.read(path)), primary_only=True)
    body = manifest.read(path)
    tree = read_step(path, body, like, tag=tag, subtree=subtree, shardings=shardings)
    return tree, metadata_of(body)["config"]
