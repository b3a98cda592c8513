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
import numpy as np

from jaxroll._version import __version__
from jaxroll.train.files import replace_file
from jaxroll.train.leaves import Shard, copy_shards, differences, named_leaves, restore
from jaxroll.types import PyTree

MANIFEST = "manifest.json"
RUN_ID = "run_id"  # beside the steps of a run: which run they are of
STEP_NAME = re.compile(r"\d{10,19}")
# After the name of a step that is being written, deleted or replaced.
WRITING, DELETING, REPLACED = ".writing", ".deleting", ".replaced"
FORMAT_VERSION = 3
TAGS = map(str, itertools.count())  # names for `together`, the same on all processes
TIMEOUT_SECONDS = 600  # for the slowest process
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

    shards: list[Shard]  # of this process
    manifest: dict[str, Any]  # all but the run, files and shards


# Writing.


def take_snapshot(
    tree: PyTree, config: dict[str, Any], step: int = 0, metrics: dict[str, float] | None = None
) -> Snapshot:
    """Copy the leaves, since they may be donated next, and describe them."""
    leaves = named_leaves(tree)
    manifest = {
        "format_version": FORMAT_VERSION,
        "jaxroll_version": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "config": as_json("config", config),
        "metrics": metrics or {},
        "leaves": {name: leaf.described for name, leaf in leaves.items()},
    }
    return Snapshot(copy_shards(leaves), manifest)


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

    `run`, called on process 0, gives the name of the run that the step is of.
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
    saved = {name: x for name, x in body["leaves"].items() if name.startswith(prefix)}
    if prefix and not saved:
        tops = sorted({name.rpartition("/")[0] for name in body["leaves"]})
        raise MismatchError(f"{directory} has no subtree {subtree!r}; there are {tops[:20]}")
    leaves = {prefix + name: leaf for name, leaf in named_leaves(like).items()}
    if problems := differences(saved, leaves):
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        listed = "\n".join(f"  {line}" for line in problems[:_SHOWN] + more)
        raise MismatchError(
            f"the checkpoint {directory} does not fit the given tree:\n{listed}\n"
            "Restore into a tree of the same architecture; the config that it was saved with "
            f"is in its {MANIFEST}."
        )
    shards: dict[str, list[Shard]] = {name: [] for name in leaves}
    with _reading(directory):
        for name, file, offset, size, start, shape in body["shards"]:
            if name in leaves and file in body["files"]:
                data = np.memmap(directory / file, np.uint8, "r", offset, (size,))  # not read yet
                values = data.view(leaves[name].dtype).reshape(shape)
                shards[name].append(Shard(name, [operator.index(i) for i in start], values))
        for name, leaf in leaves.items():
            ends = [np.add(shard.start, shard.values.shape) for shard in shards[name]]
            is_full = sum(shard.values.size for shard in shards[name]) == math.prod(leaf.shape)
            if not is_full or any((end > leaf.shape).any() for end in ends):
                raise ValueError(f"{name} is not what its manifest says")
    given = [None] * len(leaves)
    if shardings is not None:
        given = jax.tree.leaves(jax.tree.broadcast(shardings, like))
    restored = map(restore, leaves.values(), shards.values(), given)
    return jax.tree.unflatten(jax.tree.structure(like), restored), body


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

    Gives the result of process 0 if `primary_only`, else a list of all results, which must be JSON.
    The tag is the same on all processes, and used once. Talks through the coordinator and never
    through devices, so that it may run beside a training step that has collectives of its own.
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
