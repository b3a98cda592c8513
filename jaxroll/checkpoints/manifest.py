"""The manifest: what a complete step consists of, byte by byte.

It is written last. It names every file of the step with its size and SHA-256, every leaf with its
shape and dtype, and carries a digest of itself: a step exists if, and only if, all of it holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from jaxroll.checkpoints.errors import CheckpointError, DamagedError, NoCheckpointError
from jaxroll.checkpoints.leaves import Spec

NAME = "manifest.json"
FORMAT_VERSION = 1
_FIELDS = {
    "format_version": int,
    "jaxroll_version": str,
    "step": int,
    "created": str,
    "config": dict,
    "metrics": dict,
    "leaves": list,
    "files": dict,
}


def to_json(name: str, value: Any) -> Any:
    """The value as JSON gives it back (tuples become lists); raises `TypeError` for other things.

    Example:
      >>> to_json("config", {"sizes": (64, 64)})
      {'sizes': [64, 64]}
    """
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be a dict, got {type(value).__name__}")
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{name} must hold numbers, strings, booleans, None, lists and dicts only: {error}"
        ) from error


def write(directory: Path, body: dict[str, Any]) -> None:
    """Digest every file below the directory and write the manifest: synced, then renamed."""
    files = {}
    for name in sorted(_regular_files(directory)):
        path = directory / name
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[name] = {"size": path.stat().st_size, "sha256": digest}
    for folder, _, _ in os.walk(directory):
        sync_directory(Path(folder))
    body = {**body, "files": files}
    temporary = directory / (NAME + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"sha256": _digest(body), "manifest": body}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / NAME)
    sync_directory(directory)


def read(directory: Path) -> dict[str, Any]:
    """The manifest, checked in itself; raises `NoCheckpointError` or `DamagedError`."""
    try:
        text = (directory / NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpointError(f"{directory} holds no complete checkpoint (no {NAME})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{directory / NAME} cannot be read: {error}") from error
    try:
        document = json.loads(text)
        digest, body = document["sha256"], document["manifest"]
        right = digest == _digest(body)
        right = right and all(isinstance(body[k], kind) for k, kind in _FIELDS.items())
    except (ValueError, KeyError, TypeError, RecursionError):
        right, body = False, {}
    if not right:
        raise DamagedError(f"{directory / NAME} is damaged: its digest does not match its text")
    if body["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has format {body['format_version']}, written by jaxroll "
            f"{body['jaxroll_version']}; this jaxroll reads up to {FORMAT_VERSION}. Upgrade it."
        )
    return body


def leaf_specs(directory: Path, body: dict[str, Any]) -> dict[str, tuple[str, Spec]]:
    """By path: under which name a leaf's data is stored, and its shape and dtype."""
    try:
        return {
            str(path): (f"{i:05d}", Spec(tuple(int(n) for n in shape), str(dtype)))
            for i, (path, shape, dtype) in enumerate(body["leaves"])
        }
    except (TypeError, ValueError) as error:
        raise DamagedError(f"{directory / NAME} lists its leaves wrongly: {error}") from error


def verify(directory: Path, body: dict[str, Any]) -> None:
    """Compare every file with the manifest; `DamagedError` names the first wrong one."""
    listed = body["files"]
    for name in listed:
        parts = name.split("/")
        if os.path.isabs(name) or "\\" in name or "\0" in name or {"", ".", ".."} & set(parts):
            raise DamagedError(f"{directory / NAME} names a file outside of its step: {name!r}")
    found = _regular_files(directory)
    for name in sorted(found ^ listed.keys()):
        problem = "is missing" if name in listed else "is not in the manifest"
        raise DamagedError(f"{directory} is damaged: {name} {problem}")
    for name, entry in listed.items():
        path = directory / name
        try:
            size, sha256 = int(entry["size"]), entry["sha256"]
            if path.stat().st_size != size:
                got = path.stat().st_size
                raise DamagedError(f"{directory} is damaged: {name} has {got} bytes, not {size}")
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise DamagedError(f"{directory} is damaged: the SHA-256 of {name} differs")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{directory} is damaged: {name}: {error}") from error


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory outlive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _regular_files(directory: Path) -> set[str]:
    """Relative paths of all files but the manifest; a link or device among them is damage."""
    found = set()
    for folder, folders, files in os.walk(directory):
        for name in folders + files:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise DamagedError(f"{directory} is damaged: {path} is neither file nor directory")
            if stat.S_ISREG(mode) and path != directory / NAME:
                found.add(path.relative_to(directory).as_posix())
    return found
