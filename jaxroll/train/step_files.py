"""A pytree in a directory: written whole or not at all, and verified before it is read.

Orbax writes the arrays to a temporary directory and renames it when it is complete. Just before the
rename, `manifest.json` is added: the SHA-256 of every file, shape and dtype of every leaf, and a
digest of itself. (Orbax alone does not notice a flipped byte, and casts a wrong dtype silently.)
Only arrays and JSON are stored: reading a stranger's checkpoint runs no code of theirs.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll._version import __version__
from jaxroll.train.arrays import read_arrays, write_arrays
from jaxroll.types import PyTree

MANIFEST = "manifest.json"
REPLACED = ".replaced"  # behind the name of a step that is being replaced
FORMAT_VERSION = 2
_FIELDS = {"run": str, "step": int, "config": dict, "metrics": dict, "leaves": dict, "files": dict}
# Orbax writes these after the manifest; what is read does not depend on them.
_UNSEALED = {MANIFEST, "_CHECKPOINT_METADATA", "commit_success.txt"}
_SCALARS = (bool, int, float, complex)
TIMEOUT_SECONDS = 600  # longer than the barriers inside orbax (300 s), so that those report first
_SHOWN = 8  # mismatches named in full before "and n more"


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the cause, if any, is chained."""


class DamagedError(CheckpointError):
    """Files are missing, changed or cut short: what is there is not what was saved."""


class MismatchError(CheckpointError, ValueError):
    """An intact checkpoint holds other leaves, shapes or dtypes than asked for, or another run."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint here."""


class Snapshot(NamedTuple):
    """A tree at one moment, ready to be written by another thread."""

    arrays: dict[str, Any]  # by number; leaves without elements have no entry
    manifest: dict[str, Any]  # all but the files


def take_snapshot(
    tree: PyTree, config: dict[str, Any], step: int = 0, metrics: dict[str, float] | None = None
) -> Snapshot:
    """Copy the leaves and describe them; the caller's own mistakes raise here."""
    leaves = _named_leaves(tree)
    manifest = {
        "format_version": FORMAT_VERSION,
        "jaxroll_version": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "run": "",
        "step": step,
        "config": as_json("config", config),
        "metrics": metrics or {},
        "leaves": {name: _describe(name, leaf) for name, leaf in leaves.items()},
    }
    data = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves.values()]
    for x in data:  # all transfers under way before the first is waited for
        if isinstance(x, jax.Array) and x.is_fully_addressable:
            x.copy_to_host_async()

    def copy(x: Any) -> Any:  # since the leaf may be donated, or written to, next
        spread = isinstance(x, jax.Array) and not x.is_fully_addressable
        return x.copy() if spread else np.array(x)

    arrays = {f"{i:05d}": copy(x) for i, x in enumerate(data) if np.size(x)}
    # Orbax refuses a tree without arrays.
    return Snapshot(arrays or {"none": np.zeros(1)}, manifest)


def write(directory: Path, snapshot: Snapshot, tag: str) -> None:
    """Write a new directory, on all processes together; it appears when it is complete."""
    write_arrays(directory, snapshot.arrays, tag, lambda path: _seal(path, snapshot.manifest))


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a directory says that it holds, checked in itself."""
    path = directory / MANIFEST
    try:
        with _readable():
            document = json.loads(path.read_text(encoding="utf-8"))
        body = document["manifest"]
        right, version = document["sha256"] == _digest(body), body["format_version"]
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpointError(
            f"{directory} holds no complete checkpoint (no {MANIFEST})"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error!r:.200}") from error
    if not right:
        raise DamagedError(f"{path} is damaged: its digest does not match its text")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has format {version}, written by jaxroll {body.get('jaxroll_version')}; "
            f"this is jaxroll {__version__}, which reads format {FORMAT_VERSION}. Use that version."
        )
    if not all(isinstance(body.get(name), kind) for name, kind in _FIELDS.items()):
        raise DamagedError(f"{path} is damaged: it must have {', '.join(_FIELDS)}")
    return body


def verify(directory: Path, body: dict[str, Any]) -> None:
    """Compare every file with the manifest; `DamagedError` names the first wrong one."""
    listed = body["files"]
    with _readable():
        found = _files(directory)
    for name in sorted(found ^ listed.keys()):
        problem = "is missing" if name in listed else "is not in the manifest"
        raise DamagedError(f"{directory} is damaged: {name} {problem}")
    for name, sha256 in listed.items():
        try:
            with _readable(), (directory / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DamagedError(f"{directory} is damaged: {name}: {error}") from error
        if digest != sha256:
            raise DamagedError(f"{directory} is damaged: the SHA-256 of {name} differs")


def read(
    directory: Path,
    body: dict[str, Any],
    like: PyTree,
    *,
    tag: str,
    subtree: str = "",
    shardings: PyTree = None,
) -> PyTree:
    """The leaves of a verified directory in the structure of `like`.

    Leaves, shapes and dtypes are compared first with the manifest, then with the arrays as stored,
    before anything is allocated.
    """
    saved = {name: (i, described) for i, (name, described) in enumerate(body["leaves"].items())}
    if prefix := subtree.strip("/"):
        prefix += "/"
        inside = {n.removeprefix(prefix): v for n, v in saved.items() if n.startswith(prefix)}
        if not inside:
            tops = sorted({name.rpartition("/")[0] for name in saved})
            raise MismatchError(f"{directory} has no subtree {subtree!r}; there are {tops[:20]}")
        saved = inside
    leaves = _named_leaves(like)
    _check_leaves(directory, {name: described for name, (_, described) in saved.items()}, leaves)
    given = [None] * len(leaves)
    if shardings is not None:
        given = jax.tree.leaves(jax.tree.broadcast(shardings, like))
    where = [_target(leaf, sharding) for leaf, sharding in zip(leaves.values(), given)]
    forms = [_stored_form(leaf) for leaf in leaves.values()]
    numbers = [f"{saved[name][0]:05d}" for name in leaves]
    wanted = {n: (form, w) for n, form, w in zip(numbers, forms, where) if np.size(form)}
    try:
        data = read_arrays(directory, wanted, tag) if wanted else {}
    except Exception as error:
        raise DamagedError(f"{directory} cannot be read: {error}") from error

    def rebuild(like: Any, form: Any, where: Any, stored: Any) -> Any:
        if stored is None:  # no elements
            stored = np.zeros(form.shape, form.dtype)
            stored = stored if where is None else jax.device_put(stored, where)
        if _is_key(like):
            data = jax.device_put(stored) if where is None else stored
            return jax.random.wrap_key_data(data, impl=like.dtype)
        if isinstance(like, _SCALARS):
            return type(like)(stored.item())
        if isinstance(like, np.generic):
            return stored[()]
        is_placed = isinstance(like, np.ndarray) or where is not None
        return stored if is_placed else jax.device_put(stored)

    stored = [data.get(number) for number in numbers]
    rebuilt = [rebuild(*x) for x in zip(leaves.values(), forms, where, stored, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), rebuilt)


def as_json(name: str, value: Any) -> Any:
    """A dict as JSON gives it back (tuples become lists); `TypeError` for what it cannot hold."""
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be a dict, got {type(value).__name__}")
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{name} must hold numbers, strings, booleans, None, lists and dicts only: {error}"
        ) from error


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory outlive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find(directory: Path) -> Path:
    """Where a step is: under its name, or aside where a kill left it while it was replaced."""
    if directory.exists():  # "." too, which has no name to add to
        return directory
    old = directory.with_name(directory.name + REPLACED)
    return old if old.exists() else directory


def remove(path: Path) -> None:
    """Delete a file, a link or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def together(tag: str, action: Callable[[], Any], *, primary_only: bool = False) -> Any:
    """Run an action on every process, or on process 0: it succeeds for all or raises for all.

    Talks through the coordinator's key-value store and never through devices, so that it may run
    in a thread beside a training step that has collectives of its own.

    Args:
      tag: names this call; the same on all processes, and used once.
      action: what to do. Its result must be JSON where others need it.
      primary_only: act on process 0 only, the others wait and get its result.
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


# Leaves.


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(
                f"two leaves have the path {name!r}; rename a key, for instance without its '/'"
            )
        leaves[name] = leaf
    return leaves


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _describe(name: str, leaf: Any) -> str:
    """Dtype and shape, like float32[4, 64]; a typed key has a dtype like key<fry>."""
    if _is_key(leaf):
        return f"{leaf.dtype}{list(leaf.shape)}"
    leaf = np.asarray(leaf) if isinstance(leaf, _SCALARS) else leaf
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(
            f"leaves must be arrays, typed keys or Python numbers, got {type(leaf).__name__} "
            f"at {name!r}. Put it into the config, or make it a static field."
        )
    dtype = np.dtype(leaf.dtype)
    if dtype.hasobject or dtype.kind in "SUMm" or not dtype.isnative or dtype.name == "uint4":
        raise TypeError(f"cannot store dtype {dtype} at {name!r}. Cast it to a plain number type.")
    return f"{dtype.name}{list(leaf.shape)}"


def _check_leaves(directory: Path, saved: dict[str, str], leaves: dict[str, Any]) -> None:
    expected = {name: _describe(name, leaf) for name, leaf in leaves.items()}
    both = [n for n in expected if n in saved and saved[n] != expected[n]]
    problems = [f"{n}: saved {saved[n]}, expected {expected[n]}" for n in both]
    problems += [f"{n}: expected {x}, not saved" for n, x in expected.items() if n not in saved]
    problems += [f"{n}: saved {x}, not expected" for n, x in saved.items() if n not in expected]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        listed = "\n".join(f"  {line}" for line in problems[:_SHOWN] + more)
        raise MismatchError(
            f"the checkpoint {directory} does not fit the given tree:\n{listed}\n"
            "Restore into a tree of the same architecture; the config that it was saved with "
            f"is in its {MANIFEST}."
        )
    for name, leaf in leaves.items():
        on_device = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not _is_key(leaf)
        if on_device and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise MismatchError(
                f"{name} is {leaf.dtype}, which this program cannot hold on a device. Set "
                'jax.config.update("jax_enable_x64", True), or restore into a numpy template.'
            )


def _stored_form(leaf: Any) -> Any:
    """Shape and dtype of a leaf as stored: a typed key's are those of its key data."""
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return np.asarray(leaf) if isinstance(leaf, _SCALARS) else leaf


def _target(leaf: Any, sharding: Any) -> jax.sharding.Sharding | None:
    """Where a leaf's data goes; None: to the host, or uncommitted to the default device."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None  # numpy and Python numbers stay on the host
    if sharding is None and isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = leaf.sharding
    if sharding is None and isinstance(leaf, jax.Array) and leaf.committed:
        sharding = jax.random.key_data(leaf).sharding if _is_key(leaf) else leaf.sharding
    # A key's data has a trailing axis that its sharding does not name: it stays whole.
    if _is_key(leaf) and isinstance(sharding, jax.NamedSharding):
        axes = tuple(sharding.spec)[: len(leaf.shape)]
        sharding = jax.NamedSharding(sharding.mesh, jax.P(*axes))
    return sharding


# Files.


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _files(directory: Path) -> set[str]:
    """Relative paths of the files that the manifest lists; a link or device is damage."""

    found = set()
    folders = [directory]
    for path in (path for folder in folders for path in folder.iterdir()):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DamagedError(f"{directory} is damaged: {path} is neither file nor directory")
        if path.is_dir():
            folders.append(path)
        else:
            found.add(path.relative_to(directory).as_posix())
    return found - _UNSEALED


def _seal(directory: Path, manifest: dict[str, Any]) -> None:
    """Add the manifest to a complete directory, everything on the disk before it."""
    files = {}
    for name in sorted(_files(directory)):
        with (directory / name).open("rb") as file:
            files[name] = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
    body = json.loads(json.dumps({**manifest, "files": files}))
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"sha256": _digest(body), "manifest": body}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(directory):
        sync_directory(Path(folder))


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """What may not be read need not be damaged: no reason to go back to an older step."""
    try:
        yield
    except PermissionError as error:
        raise CheckpointError(
            f"{error.filename} may not be read: {error.strerror}. It need not be damaged: give "
            "this user the right to read it."
        ) from error
