"""Checkpoints: the steps of a run, saved beside the training, pruned, and found again.

A save copies the arrays and returns; a thread writes them, one save at a time. A save that fails is
tried again, then warned of, and the program goes on. See `step_files` for what is on the disk.

This uses orbax's `Checkpointer`, not its `CheckpointManager`, which (0.12.8) loses a save under way
when the program ends, skips a step that is there already, damaged or not, counts damaged steps when
it prunes, and deletes steps in place, so that a kill leaves half of one under its name.
"""

from __future__ import annotations

import datetime
import errno
import functools
import itertools
import json
import math
import os
import re
import shutil
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxroll.checks import check_choice, check_count, check_flag, check_path
from jaxroll.train import step_files
from jaxroll.train.step_files import (
    MANIFEST,
    CheckpointError,
    DamagedError,
    MismatchError,
    NoCheckpointError,
    Snapshot,
    as_json,
    read_manifest,
    take_snapshot,
    verify,
)
from jaxroll.types import PyTree

RUN_ID = "run_id"  # beside the steps: which run they are of
REPLACED, DELETING, WRITING = ".replaced", ".deleting", ".orbax-checkpoint-tmp"
TIMEOUT_SECONDS = 600  # longer than the barriers inside orbax (300 s), so that those report first
_STEP = re.compile(r"\d{10,19}")
_COUNTER = itertools.count()
_UNDER_WAY: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class SaveError(CheckpointError):
    """A checkpoint could not be written; `step` says which, `__cause__` why."""

    def __init__(self, message: str, step: int | None = None):
        super().__init__(message)
        self.step = step


class CheckpointWarning(UserWarning):
    """Something was lost or skipped, and the program goes on."""


class Restored(NamedTuple):
    """What `Checkpointer.restore` gives back."""

    step: int
    state: PyTree
    metadata: dict[str, Any]  # config, metrics, step, run, created, versions


class Checkpointer:
    """Saves and restores the states of one run in a directory.

    With several processes every method but `steps` is collective, and the directory is shared.
    Turn a failed save into an error by `warnings.simplefilter("error", CheckpointWarning)`.

    Args:
      directory: where the steps go; made by the first save.
      keep_latest: how many of the newest steps stay; None keeps all.
      keep_best: how many of the best by `best_key` stay beside them.
      best_key: the entry of `metrics` that says how good a step is; None: no best.
      best_mode: whether "max" or "min" is best.
      retries: how often a failed save is tried again, after `retry_seconds`, then twice that, …

    Attributes:
      errors: everything that failed so far, as exceptions with their causes.

    Example:
      >>> import tempfile, numpy as np
      >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
      ...     checkpointer.save(10, {"w": np.arange(3)}, config={"seed": 0})
      ...     step, state, metadata = checkpointer.restore({"w": np.zeros(3, int)})
      >>> step, state, metadata["config"]
      (10, {'w': array([0, 1, 2])}, {'seed': 0})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_latest: int | None = 3,
        keep_best: int = 1,
        best_key: str | None = None,
        best_mode: Literal["max", "min"] = "max",
        retries: int = 2,
        retry_seconds: float = 0.5,
    ):
        self.directory = check_path("directory", directory)
        self.errors: list[CheckpointError] = []
        if keep_latest is not None:
            keep_latest = check_count("keep_latest", keep_latest)
        self._keep_latest = keep_latest
        self._keep_best = check_count("keep_best", keep_best, at_least=0)
        self._best_key = best_key
        self._sign = {"max": 1.0, "min": -1.0}[check_choice("best_mode", best_mode, ("max", "min"))]
        self._retries, self._retry_seconds = retries, retry_seconds
        self._thread: threading.Thread | None = None
        self._num_reported = 0
        self._damaged: set[int] = set()  # found by restore; they count for nothing when pruning
        self._run = ""
        # The same on every process, since all make and use their checkpointers alike.
        self._tags = (f"run/{i}/{n}" for i in [next(_COUNTER)] for n in itertools.count())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.wait()

    # Writing.

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        config: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """Save a state; returns when it is copied, so that it may be donated at once.

        A step that is there already is replaced when the new one is complete.

        Args:
          step: the number to find it by, ≥ 0.
          state: any pytree of arrays, typed keys and Python numbers.
          config: what JSON can hold.
          metrics: numbers, among them `best_key` where a best step is to be kept.
        """
        if not 0 <= (step := int(step)) < 10**18:
            raise ValueError(f"step must be in [0, 10**18), got {step}")
        self.wait()
        scores = {name: float(value) for name, value in (metrics or {}).items()}
        snapshot = _snapshot(state, {} if config is None else config, step, scores)
        _finish_before_the_end()
        _UNDER_WAY.add(self)
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, next(self._tags)), name=f"save-{step}"
        )
        self._thread.start()

    def check_writable(self) -> None:
        """Make the directory, or say with a `CheckpointError` why no step can be saved there.

        Of several processes, the first may call it alone.
        """
        probe = self.directory / f".{os.getpid()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_bytes(bytes(1 << 16))  # a full disk takes the name, but no content
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be saved in {self.directory}: {error}. Make it a directory "
                "that can be written to, or choose another."
            ) from error

    def wait(self) -> bool:
        """Wait for the save under way; whether everything since the last report went well.

        Failures are warned of, each once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        new, self._num_reported = self.errors[self._num_reported :], len(self.errors)
        for error in new:
            # Here and not in the thread, where a filter that raises would go unseen.
            warnings.warn(f"{error}. The program goes on.", CheckpointWarning, stacklevel=2)
        return not new

    def _write(self, snapshot: Snapshot, tag: str) -> None:
        step = snapshot.manifest["step"]
        for attempt in range(self._retries + 1):
            try:
                _write_step(self._path(step), snapshot, f"{tag}/{attempt}", self._own_run)
                break
            except SaveError as error:
                if attempt == self._retries:
                    self.errors.append(error)
                    return
                time.sleep(self._retry_seconds * 2**attempt)
        self._damaged.discard(step)
        try:
            _together(f"{tag}/prune", lambda: self._prune(step), primary_only=True)
        except (OSError, CheckpointError) as error:
            failure = CheckpointError(f"could not delete old steps: {error}")
            failure.__cause__ = error
            self.errors.append(failure)

    def _own_run(self) -> str:
        """The name of the run whose steps are here; written down with the first."""
        path = self.directory / RUN_ID
        if self._run and not path.exists():
            text = f"{self.directory} was deleted while it was in use: the steps in it are lost"
            self.errors.append(CheckpointError(text))
        if not self._run:
            steps = self.steps()
            last: str = self._open(steps[-1])[1]["run"] if steps else ""
            self._run = _run_in(self.directory) or last or uuid.uuid4().hex
        if not path.exists():
            new = path.with_name(RUN_ID + WRITING)
            new.write_text(self._run + "\n")
            new.rename(path)
        return self._run

    def _prune(self, just_saved: int) -> None:
        """Delete what need not stay. The successor is complete, so a kill loses nothing."""
        good = {step: x for step, x in self._scores().items() if step not in self._damaged}
        latest = list(good) if self._keep_latest is None else list(good)[-self._keep_latest :]
        keep = {just_saved, *latest, *self._best(good)[: self._keep_best]}
        for path in list(self.directory.iterdir()):
            name, dot, ending = path.name.partition(".")
            if not _STEP.fullmatch(name):
                continue
            if not ending and int(name) not in keep and self._is_ours(int(name)):
                # Renamed first, so that no half of a step ever has its name.
                _remove(path.rename(path.with_name(name + DELETING)))
            elif dot + ending in (DELETING, WRITING) or (
                dot + ending == REPLACED and (self.directory / name).exists()
            ):
                _remove(path)

    def _is_ours(self, step: int) -> bool:
        """Whether a step may be deleted: not if it is another run's, or in another format."""
        try:
            self._open(step)
        except CheckpointError as error:
            return isinstance(error, DamagedError | NoCheckpointError)
        return True

    # Reading.

    def steps(self) -> list[int]:
        """The steps whose manifest is right, oldest first; their files are verified on restore."""
        return list(self._scores())

    def latest_step(self) -> int | None:
        """The newest step, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the best `metrics[best_key]` (the later one of equals), or None."""
        return next(iter(self._best(self._scores())), None)

    def restore(
        self,
        like: PyTree,
        *,
        step: int | None = None,
        subtree: str = "",
        shardings: PyTree = None,
    ) -> Restored:
        """The newest intact state, or that of a step, verified bit by bit.

        A damaged step is named in a warning and skipped for the one before; if it was asked for
        by `step`, it is an error. So is a step of another run, or one that may not be read.

        Args:
          like: a tree of the same structure; of arrays, or of `jax.ShapeDtypeStruct`s (as from
            `jax.eval_shape`), perhaps with shardings. Numpy leaves come back as numpy.
          step: which one; None: the newest.
          subtree: take only what is saved below this path, for instance "state/learner/params".
          shardings: a tree of shardings that may stop higher up than `like` (or one sharding for
            all); it goes before the shardings of `like`, and need not be what was saved with.
        """
        self.wait()
        tag = next(self._tags)
        chosen, damage = _together(f"{tag}/choose", lambda: self._choose(step), primary_only=True)
        for number, problem in damage:
            self._damaged.add(number)
            warnings.warn(
                f"step {number} is skipped: {problem}. Going back to step {chosen}.",
                CheckpointWarning,
                stacklevel=2,
            )
        path, body = self._open(chosen)
        state = step_files.read(path, body, like, tag=tag, subtree=subtree, shardings=shardings)
        metadata = {name: body[name] for name in body if name not in ("leaves", "files")}
        return Restored(chosen, state, metadata)

    def _choose(self, step: int | None) -> tuple[int, list[tuple[int, str]]]:
        """The newest step that verifies, and what is wrong with those after it."""
        damage: list[tuple[int, str]] = []
        for number in reversed(self._numbers()) if step is None else [step]:
            try:
                verify(*self._open(number))
            except (DamagedError, NoCheckpointError) as error:
                if step is not None:
                    raise
                damage.append((number, str(error)))
                continue
            return number, damage
        if damage:
            listed = "\n".join(f"  {problem}" for _, problem in damage)
            raise DamagedError(f"{self.directory} holds no intact step:\n{listed}")
        raise NoCheckpointError(f"{self.directory} holds no checkpoint")

    def _path(self, step: int) -> Path:
        return self.directory / f"{step:010d}"

    def _open(self, step: int) -> tuple[Path, dict[str, Any]]:
        path = _find(self._path(step))
        body = read_manifest(path)
        if body["step"] != step:
            raise DamagedError(f"{path} says that it is step {body['step']}")
        _check_run(path, body)
        return path, body

    def _numbers(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        names = {path.name.removesuffix(REPLACED) for path in self.directory.iterdir()}
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def _scores(self) -> dict[int, float]:
        """Every step with a right manifest, oldest first, with its `best_key` metric or NaN."""
        scores: dict[int, float] = {}
        for number in self._numbers():
            try:
                score = self._open(number)[1]["metrics"].get(self._best_key)
            except CheckpointError:
                continue
            scores[number] = score if isinstance(score, float) else math.nan
        return scores

    def _best(self, scores: dict[int, float]) -> list[int]:
        """Steps from best to worst, without those that have no score."""
        rated = [(self._sign * x, step) for step, x in scores.items() if not math.isnan(x)]
        return [step for _, step in sorted(rated, reverse=True)]


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
    path = check_path("path", path)
    check_flag("overwrite", overwrite)
    tag = f"single/{next(_COUNTER)}"

    def check() -> None:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists. Choose another path, or pass overwrite=True.")
        if path.exists() and not (path / MANIFEST).is_file():
            raise FileExistsError(f"{path} is no checkpoint, so it is not overwritten. Remove it.")

    _together(f"{tag}/check", check, primary_only=True)
    _write_step(path, _snapshot(tree, {} if metadata is None else metadata), tag)
    old = path.with_name(path.name + REPLACED)
    _together(f"{tag}/clean", lambda: _remove(old), primary_only=True)


def load_pytree(
    path: str | os.PathLike[str], like: PyTree, *, subtree: str = "", shardings: PyTree = None
) -> tuple[PyTree, dict[str, Any]]:
    """The tree and the metadata at a path, verified; a mismatch names leaves and shapes.

    Args:
      path: a directory of `save_pytree`, one step of a run, or a run's checkpoint directory
        (its newest intact step is taken).
      like: a tree of the same structure, of arrays or `jax.ShapeDtypeStruct`s.
      subtree: take only what is saved below this path, for instance "state/learner/params".
      shardings: where leaves go; see `Checkpointer.restore`.

    Returns:
      the tree, and the metadata (of a run's step: its config).
    """
    path = _find(check_path("path", path))
    if not (path / MANIFEST).is_file() and (run := Checkpointer(path))._numbers():
        restored = run.restore(like, subtree=subtree, shardings=shardings)
        return restored.state, restored.metadata["config"]
    tag = f"single/{next(_COUNTER)}"
    _together(f"{tag}/verify", lambda: verify(path, read_manifest(path)), primary_only=True)
    body = read_manifest(path)
    _check_run(path, body)
    tree = step_files.read(path, body, like, tag=tag, subtree=subtree, shardings=shardings)
    return tree, body["config"]


def _snapshot(tree: PyTree, config: Any, step: int = 0, metrics: Any = None) -> Snapshot:
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    config = as_json("config", config)
    return take_snapshot(
        tree, run="", step=step, created=created, config=config, metrics=metrics or {}
    )


def _write_step(
    directory: Path, snapshot: Snapshot, tag: str, run: Callable[[], str] = str
) -> None:
    """Write on all processes together; an older step of that name is kept aside as `.replaced`."""
    old = directory.with_name(directory.name + REPLACED)

    def prepare() -> None:
        if directory.parent.is_file():  # for which mkdir only says that it exists
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(directory.parent))
        directory.parent.mkdir(parents=True, exist_ok=True)
        snapshot.manifest["run"] = run()
        if directory.exists():
            _remove(old)
            directory.rename(old)

    try:
        _together(f"{tag}/prepare", prepare, primary_only=True)
        _together(f"{tag}/write", lambda: step_files.write(directory, snapshot, f"{tag}/arrays"))
        sync = functools.partial(step_files.sync_directory, directory.parent)
        _together(f"{tag}/sync", sync, primary_only=True)
    except Exception as error:
        if jax.process_index() == 0:  # a full disk needs the space
            shutil.rmtree(directory.with_name(directory.name + WRITING), ignore_errors=True)
        text = f"{type(error).__name__}: {error}"
        parent = next((p for p in directory.absolute().parents if p.is_dir()), None)
        if parent is not None and shutil.disk_usage(parent).free < 1 << 20:
            text = f"the disk of {parent} is full ({text})"
        text = f"could not save {directory}: {text.splitlines()[0][:500]}"
        raise SaveError(text, snapshot.manifest["step"]) from error


def _find(directory: Path) -> Path:
    """Where a step is: under its name, or aside where a kill left it while it was replaced."""
    if directory.exists():  # "." too, which has no name to add to
        return directory
    old = directory.with_name(directory.name + REPLACED)
    return old if old.exists() else directory


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run_in(directory: Path) -> str:
    """The run whose steps a directory holds; empty if it is not written there."""
    try:
        text = (directory / RUN_ID).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return text if re.fullmatch("[0-9a-f]{32}", text) else ""


def _check_run(path: Path, body: dict[str, Any]) -> None:
    """Raise `MismatchError` if a step lies in the directory of another run."""
    owner = _run_in(path.parent)
    if owner and body["run"] != owner and _STEP.fullmatch(path.name.removesuffix(REPLACED)):
        raise MismatchError(
            f"{path} is a step of another run, {body['run'] or 'unnamed'}; the directory's "
            f"{RUN_ID} names {owner}. Move the step elsewhere, and load it from there by its path."
        )


def _together(tag: str, action: Callable[[], Any], *, primary_only: bool = False) -> Any:
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


def _finish() -> None:
    for checkpointer in list(_UNDER_WAY):
        checkpointer.wait()


@functools.cache
def _finish_before_the_end() -> None:
    # When a program ends, Python first forbids new work in thread pools, which orbax needs, and
    # only then waits for threads: a save under way would fail. Hooks run last in, first out; so
    # with orbax (and its pools) imported first, this one waits before that.
    import orbax.checkpoint  # noqa: F401

    threading._register_atexit(_finish)  # pyright: ignore[reportAttributeAccessIssue]
