"""One step: a directory with the arrays and the manifest, written whole or not at all.

Everything is built in `<name>.saving` and renamed when its manifest stands. What is replaced or
pruned is first renamed to `<name>.deleting`, so that no half of a step ever bears its name.
"""

from __future__ import annotations

import datetime
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxroll._version import __version__
from jaxroll.checkpoints import arrays, leaves, manifest
from jaxroll.checkpoints.errors import CheckpointError, DamagedError, MismatchError, SaveError
from jaxroll.checkpoints.processes import is_primary, together
from jaxroll.types import PyTree

ARRAYS = "arrays"
SAVING, DELETING = ".saving", ".deleting"


class Snapshot(NamedTuple):
    """A state at one moment, ready to be written by another thread."""

    arrays: dict[str, Any]  # by stored name; leaves with no elements have no entry
    body: dict[str, Any]  # the manifest but for the files


def take_snapshot(step: int, tree: PyTree, config: Any, metrics: dict[str, float]) -> Snapshot:
    """Copy the leaves and describe them; the caller's own mistakes raise here."""
    named = leaves.named_leaves(tree)
    specs = {name: leaves.spec_of(name, leaf) for name, leaf in named.items()}
    for leaf in named.values():  # all transfers under way before the first is waited for
        if isinstance(leaf, jax.Array) and not leaves.is_key(leaf) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    stored = {
        f"{i:05d}": leaves.snapshot(leaf)
        for i, (name, leaf) in enumerate(named.items())
        if math.prod(specs[name].shape)
    }
    body = {
        "format_version": manifest.FORMAT_VERSION,
        "jaxroll_version": __version__,
        "step": step,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": manifest.to_json("config", config),
        "metrics": metrics,
        "leaves": [[name, list(spec.shape), spec.dtype] for name, spec in specs.items()],
    }
    return Snapshot(stored, body)


def write_step(directory: Path, snapshot: Snapshot, tag: str) -> None:
    """Write a step on all processes together; an older step of that name goes when this stands."""
    saving = directory.with_name(directory.name + SAVING)

    def prepare() -> None:
        if find(directory) == saving:  # complete but for its name, by a process that was killed
            saving.rename(directory)
        remove(saving)
        saving.mkdir(parents=True)

    def complete() -> None:
        manifest.write(saving, snapshot.body)
        if directory.exists():
            deleting = directory.with_name(directory.name + DELETING)
            remove(deleting)
            directory.rename(deleting)
        saving.rename(directory)
        manifest.sync_directory(directory.parent)

    try:
        together(f"{tag}/prepare", prepare, primary_only=True)
        together(
            f"{tag}/write",
            lambda: arrays.write_arrays(saving / ARRAYS, snapshot.arrays, f"{tag}/arrays"),
        )
        together(f"{tag}/complete", complete, primary_only=True)
    except Exception as error:
        if is_primary():  # a full disk needs the room
            shutil.rmtree(saving, ignore_errors=True)
        text = f"could not save {directory}: {_explain(error, directory)}"
        raise SaveError(text, snapshot.body["step"]) from error


def read_step(
    directory: Path,
    body: dict[str, Any],
    like: PyTree,
    *,
    tag: str,
    subtree: str = "",
    shardings: PyTree = None,
) -> PyTree:
    """The leaves of a verified step in the structure of `like`, checked in shape and dtype."""
    saved = manifest.leaf_specs(directory, body)
    prefix = subtree.strip("/")
    if prefix:
        inside = {path: entry for path, entry in saved.items() if path.startswith(prefix + "/")}
        if not inside:
            tops = sorted({path.rsplit("/", 1)[0] for path in saved})
            raise MismatchError(f"{directory} has no subtree {prefix!r}; there are {tops[:20]}")
        saved = {path[len(prefix) + 1 :]: entry for path, entry in inside.items()}

    expected = leaves.named_leaves(like)
    specs = {name: leaves.spec_of(name, leaf) for name, leaf in expected.items()}
    leaves.check_specs({n: spec for n, (_, spec) in saved.items()}, specs, str(directory))
    for name, template in expected.items():
        leaves.check_holdable(name, template)
    given = _broadcast(shardings, like)
    where = {n: leaves.target_sharding(x, s) for (n, x), s in zip(expected.items(), given)}
    names = {saved[n][0]: where[n] for n in expected if math.prod(specs[n].shape)}
    try:
        data = arrays.read_arrays(directory / ARRAYS, names, tag)
    except Exception as error:
        raise DamagedError(f"{directory} cannot be read: {error}") from error

    def leaf(name: str, template: Any) -> Any:
        held = leaves.stored_form(template)
        value = data.get(saved[name][0])
        if value is None:
            value = np.zeros(held.shape, held.dtype)
            value = value if where[name] is None else jax.device_put(value, where[name])
        if (value.shape, value.dtype) != (held.shape, held.dtype):
            raise DamagedError(
                f"{directory} holds {value.dtype}{list(value.shape)} at {name}, which is not what "
                f"its manifest says: {specs[name]}"
            )
        return leaves.rebuild(template, where[name], value)

    return jax.tree.unflatten(
        jax.tree.structure(like), [leaf(name, template) for name, template in expected.items()]
    )


def find(directory: Path) -> Path:
    """Where a step lies: under its name, or complete under the name it was built with.

    The latter is what a kill between a manifest's writing and the directory's renaming leaves.
    """
    if directory.exists():  # "." too, which has no name to add to
        return directory
    saving = directory.with_name(directory.name + SAVING)
    return saving if (saving / manifest.NAME).is_file() else directory


def metadata_of(body: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says beside leaves and files."""
    return {name: body[name] for name in body if name not in ("leaves", "files")}


def remove(directory: Path) -> None:
    """Delete a directory or file if it is there."""
    if directory.is_dir() and not directory.is_symlink():
        shutil.rmtree(directory)
    else:
        directory.unlink(missing_ok=True)


def _broadcast(shardings: PyTree, like: PyTree) -> list[Any]:
    """One sharding (or None) for each leaf of `like`, from a tree that may stop higher up."""
    if shardings is None:
        return [None] * len(jax.tree.leaves(like))
    return jax.tree.leaves(jax.tree.broadcast(shardings, like))


def _explain(error: Exception, directory: Path) -> str:
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    parent = next((p for p in directory.absolute().parents if p.is_dir()), None)
    if parent is not None and shutil.disk_usage(parent).free < 1 << 20:
        text = f"the disk of {parent} is full ({text})"
    return text.splitlines()[0][:500]
