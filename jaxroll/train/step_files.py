"""A pytree in a directory: written whole or not at all, and verified before it is read.

Each process writes the shards that it holds, as raw bytes, to one file and hashes them on the way.
`manifest.json`, the last file, has the SHA-256 of every file, where each shard is, shape and dtype
of every leaf, and a digest of itself. The directory is renamed to its name when all of it is on the
disk. Only numbers and JSON are stored: reading a stranger's checkpoint runs no code of theirs.

Not orbax (0.12.8): it does not notice a flipped byte, casts a wrong dtype silently, loses a save
under way when the program ends, and reports a failed write by tracebacks at any later moment.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import math
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll._version import __version__
from jaxroll.train.files import replace_file
from jaxroll.types import PyTree

MANIFEST = "manifest.json"
RUN_ID = "run_id"  # beside the steps of a run: which run they are of
STEP_NAME = re.compile(r"\d{10,19}")
# After the name of a step that is being written, deleted or replaced.
WRITING, DELETING, REPLACED = ".writing", ".deleting", ".replaced"
FORMAT_VERSION = 3
TAGS = map(str, itertools.count())  # names for `together`, the same on all processes
TIMEOUT_SECONDS = 600  # for the slowest process
_SCALARS = (bool, int, float, complex)
_SHOWN = 8  # mismatches named in full before "and n more"

Shard = tuple[str, list[int], np.ndarray]  # of which leaf, its first index there, its values


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

    shards: list[Shard]  # of this process
    manifest: dict[str, Any]  # all but the run, files and shards


# Writing.


def take_snapshot(
    tree: PyTree, config: dict[str, Any], step: int = 0, metrics: dict[str, float] | None = None
) -> Snapshot:
    """Copy the leaves, since they may be donated next, and describe them."""
    leaves = _named_leaves(tree)
    manifest = {
        "format_version": FORMAT_VERSION,
        "jaxroll_version": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "config": as_json("config", config),
        "metrics": metrics or {},
        "leaves": {name: _describe(name, leaf) for name, leaf in leaves.items()},
    }
    leaves = {n: jax.random.key_data(x) if _is_key(x) else x for n, x in leaves.items()}
    for x in leaves.values():  # all transfers under way before the first is waited for
        if isinstance(x, jax.Array) and x.is_fully_addressable:
            x.copy_to_host_async()
    shards: list[Shard] = []
    for name, x in leaves.items():
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            own = [shard for shard in x.addressable_shards if shard.replica_id == 0]
            shards += [(name, [s.start or 0 for s in o.index], np.array(o.data)) for o in own]
        elif jax.process_index() == 0:
            shards.append((name, [0] * np.ndim(x), np.array(x)))
    return Snapshot([shard for shard in shards if shard[2].size], manifest)


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


def write_step(directory: Path, snapshot: Snapshot, tag: str, run: Callable[[], str] = str) -> None:
    """Write on all processes together; an older step is replaced when this one is complete.

    Args:
      directory: appears when all of it is on the disk.
      snapshot: what to write.
      tag: for `together`.
      run: gives the name of the run, on process 0.
    """
    temporary, old = (directory.with_name(directory.name + x) for x in (WRITING, REPLACED))

    def prepare() -> str:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        return run()

    def seal() -> None:
        files = {file: sha256 for file, sha256, _ in written}
        shards = [place for _, _, places in written for place in places]
        body = {**snapshot.manifest, "run": name, "files": files, "shards": shards}
        document = {"sha256": _digest(body), "manifest": body}
        replace_file(temporary / MANIFEST, json.dumps(document, indent=1).encode())
        _sync(temporary)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)
        temporary.rename(directory)
        _sync(directory.parent)
        shutil.rmtree(old, ignore_errors=True)

    try:
        name = together(f"{tag}/prepare", prepare, primary_only=True)
        written = together(f"{tag}/write", lambda: write_shards(temporary, snapshot.shards))
        together(f"{tag}/seal", seal, primary_only=True)
    except Exception as error:
        if jax.process_index() == 0:  # a full disk needs the space
            shutil.rmtree(temporary, ignore_errors=True)
        text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        raise CheckpointError(f"could not save {directory}: {text}") from error


def write_shards(directory: Path, shards: list[Shard]) -> tuple[str, str, list[Any]]:
    """Write this process's file: its name, its SHA-256, and where each shard is."""
    name, sha256, places = f"arrays.{jax.process_index()}", hashlib.sha256(), []
    with (directory / name).open("wb") as file:
        for leaf, start, values in shards:
            data: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            places.append([leaf, name, file.tell(), len(data), start, list(values.shape)])
            file.write(data)
            sha256.update(data)
        file.flush()
        os.fsync(file.fileno())
    return name, sha256.hexdigest(), places


# Reading.


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a directory says that it holds, checked in itself and against its place in a run."""
    with _reading(directory, MANIFEST):
        document = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        body = document["manifest"]
        if document["sha256"] != _digest(body):
            raise ValueError("its digest does not match its text")
        if (version := body["format_version"]) != FORMAT_VERSION:
            raise CheckpointError(
                f"{directory} has format {version}, written by jaxroll {body['jaxroll_version']}; "
                f"jaxroll {__version__} reads format {FORMAT_VERSION}. Use that version."
            )
        fields = {"run": str, "step": int, "config": dict, "metrics": dict, "leaves": dict}
        for name, kind in {**fields, "files": dict, "shards": list}.items():
            if not isinstance(body[name], kind):
                raise ValueError(f"{name} is {body[name]!r:.50}")
        number = directory.name.removesuffix(REPLACED)
        if body["run"] and STEP_NAME.fullmatch(number) and int(number) != body["step"]:
            raise ValueError(f"it says that it is step {body['step']}")
    owner = run_in(directory.parent)
    if owner and owner != body["run"] and STEP_NAME.fullmatch(number):
        raise MismatchError(
            f"{directory} is a step of another run, {body['run'] or 'unnamed'}; the directory's "
            f"{RUN_ID} names {owner}. Move the step elsewhere, and load it from there by its path."
        )
    return body


def run_in(directory: Path) -> str:
    """The run whose steps a directory holds; empty if it is not written there."""
    try:
        text = (directory / RUN_ID).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return text if re.fullmatch("[0-9a-f]{32}", text) else ""


def verify(directory: Path) -> None:
    """Compare every file with the manifest; `DamagedError` names the first wrong one."""
    listed = read_manifest(directory)["files"]
    with _reading(directory):
        paths = {path.name: path for path in directory.iterdir()}
        for name in sorted(paths.keys() ^ {MANIFEST, *listed}):
            problem = "is missing" if name in listed else "is not in the manifest"
            raise ValueError(f"{name} {problem}")
        for name, path in paths.items():
            if path.is_symlink() or not path.is_file():
                raise ValueError(f"{name} is no regular file")
        for name, sha256 in listed.items():
            with paths[name].open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise ValueError(f"the SHA-256 of {name} differs")


def read(
    directory: Path, like: PyTree, *, subtree: str = "", shardings: PyTree = None
) -> tuple[PyTree, dict[str, Any]]:
    """The leaves of a verified directory in the structure of `like`, and its manifest.

    Leaves, shapes, dtypes and sizes are compared before anything is allocated.
    """
    body = read_manifest(directory)
    prefix = f"{subtree.strip('/')}/".lstrip("/")
    saved = {n.removeprefix(prefix): x for n, x in body["leaves"].items() if n.startswith(prefix)}
    if prefix and not saved:
        tops = sorted({name.rpartition("/")[0] for name in body["leaves"]})
        raise MismatchError(f"{directory} has no subtree {subtree!r}; there are {tops[:20]}")
    leaves = _named_leaves(like)
    _check_leaves(directory, saved, leaves)
    forms = {prefix + name: _stored_form(leaf) for name, leaf in leaves.items()}
    with _reading(directory):
        shards = _map_shards(directory, body, forms)
    given = [None] * len(leaves)
    if shardings is not None:
        given = jax.tree.leaves(jax.tree.broadcast(shardings, like))

    def restore(leaf: Any, sharding: Any, name: str) -> Any:
        form, where = forms[name], _target(leaf, sharding)
        part = functools.partial(_assemble, shards[name], form)
        if where is not None:
            data: Any = jax.make_array_from_callback(form.shape, where, part, dtype=form.dtype)
        else:
            data = part((slice(None),) * len(form.shape))
        if isinstance(leaf, np.ndarray | np.generic):
            return data if isinstance(leaf, np.ndarray) else data[()]
        if isinstance(leaf, _SCALARS):
            return type(leaf)(data.item())
        data = jax.device_put(data) if where is None else data
        return jax.random.wrap_key_data(data, impl=leaf.dtype) if _is_key(leaf) else data

    restored = map(restore, leaves.values(), given, forms)
    return jax.tree.unflatten(jax.tree.structure(like), restored), body


def _map_shards(
    directory: Path, body: dict[str, Any], forms: dict[str, Any]
) -> dict[str, list[Shard]]:
    """The shards of each leaf, mapped and not yet read; they fill it, as far as sizes tell."""
    shards: dict[str, list[Shard]] = {name: [] for name in forms}
    for leaf, file, offset, size, start, shape in body["shards"]:
        if leaf in forms and file in body["files"]:
            data = np.memmap(directory / file, np.uint8, "r", offset, (size,))
            values = data.view(forms[leaf].dtype).reshape(shape)
            shards[leaf].append((leaf, [operator.index(i) for i in start], values))
    for name, form in forms.items():
        is_inside = [
            all(i >= 0 and i + n <= m for i, n, m in zip(start, x.shape, form.shape, strict=True))
            for _, start, x in shards[name]
        ]
        sizes = [x.size for _, _, x in shards[name]]
        if not all(is_inside) or sum(sizes) != math.prod(form.shape):
            raise ValueError(f"{name} is not what its manifest says")
    return shards


def _assemble(shards: list[Shard], form: Any, index: Any) -> np.ndarray:
    """One part of a leaf, copied from all shards that it overlaps."""
    bounds = [s.indices(size)[:2] for s, size in zip(index, form.shape)]
    part = np.zeros([end - begin for begin, end in bounds], form.dtype)
    for _, start, values in shards:
        into, out_of = [], []
        for (begin, end), first, size in zip(bounds, start, values.shape):
            low = max(begin, first)
            high = max(low, min(end, first + size))
            into.append(slice(low - begin, high - begin))
            out_of.append(slice(low - first, high - first))
        part[tuple(into)] = values[tuple(out_of)]
    return part


# Leaves.


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(f"two leaves have the path {name!r}; rename a key, as without its '/'")
        leaves[name] = leaf
    return leaves


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _describe(name: str, leaf: Any) -> str:
    """Dtype and shape, like float32[4, 64]; a typed key has a dtype like key<fry>."""
    leaf = np.asarray(leaf) if isinstance(leaf, _SCALARS) else leaf
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(
            f"leaves must be arrays, typed keys or Python numbers, got {type(leaf).__name__} "
            f"at {name!r}. Put it into the config, or make it a static field."
        )
    dtype = leaf.dtype if _is_key(leaf) else np.dtype(leaf.dtype)
    if isinstance(dtype, np.dtype) and (
        dtype.kind in "OSUMm" or dtype.fields or not dtype.isnative
    ):
        raise TypeError(f"cannot store dtype {dtype} at {name!r}. Cast it to a plain number type.")
    return f"{dtype.name}{list(leaf.shape)}"


def _check_leaves(directory: Path, saved: dict[str, str], leaves: dict[str, Any]) -> None:
    expected = {name: _describe(name, leaf) for name, leaf in leaves.items()}
    problems = [
        f"{name}: saved {saved.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
        for name in expected | saved
        if saved.get(name) != expected.get(name)
    ]
    problems += [
        f"{name}: {leaf.dtype} needs jax.config.update('jax_enable_x64', True), or a numpy template"
        for name, leaf in leaves.items()
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not _is_key(leaf)
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
    ]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        listed = "\n".join(f"  {line}" for line in problems[:_SHOWN] + more)
        raise MismatchError(
            f"the checkpoint {directory} does not fit the given tree:\n{listed}\n"
            "Restore into a tree of the same architecture; the config that it was saved with "
            f"is in its {MANIFEST}."
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
    where: Any = sharding
    if where is None and getattr(leaf, "committed", True):
        where = getattr(leaf, "sharding", None)
    # A key's data has a trailing axis that its sharding does not name: it stays whole.
    if _is_key(leaf) and where is not None and isinstance(where, jax.NamedSharding):
        where = jax.NamedSharding(where.mesh, jax.P(*tuple(where.spec)[: len(leaf.shape)]))
    return where


# Files and processes.


def find(directory: Path) -> Path:
    """Where a step is: under its name, or aside where a kill left it while it was replaced."""
    if directory.exists():  # "." too, which has no name to add to
        return directory
    old = directory.with_name(directory.name + REPLACED)
    return old if old.exists() else directory


@contextlib.contextmanager
def _reading(directory: Path, name: str = "") -> Iterator[None]:
    """Name what was read in an error; what may not be read need not be damaged."""
    try:
        yield
    except CheckpointError:
        raise
    except PermissionError as error:
        raise CheckpointError(
            f"{error.filename} may not be read: {error.strerror}. It need not be damaged: give "
            "this user the right to read it."
        ) from error
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpointError(f"{directory} holds no complete checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        problem = str(error) if type(error) is ValueError else f"{error!r:.200}"
        raise DamagedError(f"{directory / name} is damaged: {problem}") from error


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _sync(directory: Path) -> None:
    """Make renames and new names in a directory outlive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def together(tag: str, action: Callable[[], Any], *, primary_only: bool = False) -> Any:
    """Run an action on every process, or on process 0: it succeeds for all or raises for all.

    Talks through the coordinator's key-value store and never through devices, so that it may run
    in a thread beside a training step that has collectives of its own.

    Args:
      tag: names this call; the same on all processes, and used once.
      action: what to do; its result must be JSON.
      primary_only: act on process 0 only.

    Returns:
      the result of process 0 if `primary_only`, else those of all processes.
    """
    if jax.process_count() == 1:
        return action() if primary_only else [action()]
    from jax._src import distributed

    client: Any = distributed.global_state.client
    rank, failure, result = jax.process_index(), None, None
    if not primary_only or rank == 0:
        try:
            result = action()
        except Exception as error:
            failure = error
    text = f"{type(failure).__name__}: {failure}" if failure else None
    client.key_value_set(f"jaxroll/{tag}/{rank}", json.dumps([text, result]))
    everyone = [
        json.loads(client.blocking_key_value_get(f"jaxroll/{tag}/{i}", TIMEOUT_SECONDS * 1000))
        for i in range(jax.process_count())
    ]
    if failure is not None:
        raise failure
    for i, (text, _) in enumerate(everyone):
        if text is not None:
            raise CheckpointError(f"process {i} failed: {text}")
    return everyone[0][1] if primary_only else [result for _, result in everyone]
