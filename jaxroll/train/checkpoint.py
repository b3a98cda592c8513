"""Checkpoints: the steps of a run, saved beside the training, pruned, and found again.

A save copies the arrays and returns; a thread writes them, one save at a time. A save that fails is
tried again, then warned of, and the program goes on. See `step_files` for what is on the disk.

This uses orbax's `Checkpointer`, not its `CheckpointManager`, which (0.12.8) loses a save under way
when the program ends, skips a step that is there already, damaged or not, counts damaged steps when
it prunes, and deletes steps in place, so that a kill leaves half of one under its name.
"""

from __future__ import annotations

import errno
import functools
import itertools
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
from typing import Any, NamedTuple

import jax

from jaxroll.checks import check_count, check_path
from jaxroll.train import step_files
from jaxroll.train.files import replace_file
from jaxroll.train.step_files import (
    REPLACED,
    CheckpointError,
    DamagedError,
    MismatchError,
    NoCheckpointError,
    Snapshot,
    find,
    read_manifest,
    remove,
    take_snapshot,
    together,
    verify,
)
from jaxroll.types import PyTree

RUN_ID = "run_id"  # beside the steps: which run they are of
DELETING, WRITING = ".deleting", ".orbax-checkpoint-tmp"
_STEP = re.compile(r"\d{10,19}")
_COUNTER = itertools.count()
_UNDER_WAY: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


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
      keep_latest: how many of the newest steps stay.
      keep_best: how many of the best by `best_key` stay beside them.
      best_key: the entry of `metrics` that says how good a step is, more being better; None: no
        best.
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
        keep_latest: int = 3,
        keep_best: int = 1,
        best_key: str | None = None,
        retries: int = 2,
        retry_seconds: float = 0.5,
    ):
        self.directory = check_path("directory", directory)
        self.errors: list[CheckpointError] = []
        self._keep_latest = check_count("keep_latest", keep_latest)
        self._keep_best = check_count("keep_best", keep_best, at_least=0)
        self._best_key = best_key
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
        snapshot = take_snapshot(state, {} if config is None else config, step, scores)
        _finish_before_the_end()
        _UNDER_WAY.add(self)
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, next(self._tags)), name=f"save-{step}"
        )
        self._thread.start()

    def check_writable(self) -> None:
        """Make the directory, or raise why no step can be saved there; one process is enough."""
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
                write_step(self._path(step), snapshot, f"{tag}/{attempt}", self._own_run)
                break
            except CheckpointError as error:
                if attempt == self._retries:
                    self.errors.append(error)
                    return
                time.sleep(self._retry_seconds * 2**attempt)
        self._damaged.discard(step)
        try:
            together(f"{tag}/prune", lambda: self._prune(step), primary_only=True)
        except (OSError, CheckpointError) as error:
            self.errors.append(CheckpointError(f"could not delete old steps: {error}"))

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
            replace_file(path, f"{self._run}\n".encode())
        return self._run

    def _prune(self, just_saved: int) -> None:
        """Delete what need not stay. The successor is complete, so a kill loses nothing."""
        good = {step: x for step, x in self._scores().items() if step not in self._damaged}
        keep = {just_saved, *list(good)[-self._keep_latest :]}
        keep.update(self._best(good)[: self._keep_best])
        for path in list(self.directory.iterdir()):
            name, dot, ending = path.name.partition(".")
            if not _STEP.fullmatch(name):
                continue
            if not ending and int(name) not in keep and self._is_ours(int(name)):
                # Renamed first, so that no half of a step ever has its name.
                remove(path.rename(path.with_name(name + DELETING)))
            elif dot + ending in (DELETING, WRITING) or (
                dot + ending == REPLACED and (self.directory / name).exists()
            ):
                remove(path)

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
        chosen, damage = together(f"{tag}/choose", lambda: self._choose(step), primary_only=True)
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
        for number in reversed(self.numbers()) if step is None else [step]:
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
        path = find(self._path(step))
        body = read_manifest(path)
        if body["step"] != step:
            raise DamagedError(f"{path} says that it is step {body['step']}")
        check_run(path, body)
        return path, body

    def numbers(self) -> list[int]:
        """The steps whose directory is there, damaged or not."""
        if not self.directory.is_dir():
            return []
        names = {path.name.removesuffix(REPLACED) for path in self.directory.iterdir()}
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def _scores(self) -> dict[int, float]:
        """Every step with a right manifest, oldest first, with its `best_key` metric or NaN."""
        scores: dict[int, float] = {}
        for number in self.numbers():
            try:
                score = self._open(number)[1]["metrics"].get(self._best_key)
            except CheckpointError:
                continue
            scores[number] = score if isinstance(score, float) else math.nan
        return scores

    def _best(self, scores: dict[int, float]) -> list[int]:
        """Steps from best to worst, without those that have no score."""
        rated = [step for step, score in scores.items() if not math.isnan(score)]
        return sorted(rated, key=lambda step: (scores[step], step), reverse=True)


def write_step(directory: Path, snapshot: Snapshot, tag: str, run: Callable[[], str] = str) -> None:
    """Write on all processes together; an older step of that name is kept aside as `.replaced`."""
    old = directory.with_name(directory.name + REPLACED)

    def prepare() -> None:
        if directory.parent.is_file():  # for which mkdir only says that it exists
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(directory.parent))
        directory.parent.mkdir(parents=True, exist_ok=True)
        snapshot.manifest["run"] = run()
        if directory.exists():
            remove(old)
            directory.rename(old)

    try:
        together(f"{tag}/prepare", prepare, primary_only=True)
        together(f"{tag}/write", lambda: step_files.write(directory, snapshot, f"{tag}/arrays"))
        sync = functools.partial(step_files.sync_directory, directory.parent)
        together(f"{tag}/sync", sync, primary_only=True)
    except Exception as error:
        if jax.process_index() == 0:  # a full disk needs the space
            shutil.rmtree(directory.with_name(directory.name + WRITING), ignore_errors=True)
        text = f"{type(error).__name__}: {error}"
        parent = next((p for p in directory.absolute().parents if p.is_dir()), None)
        if parent is not None and shutil.disk_usage(parent).free < 1 << 20:
            text = f"the disk of {parent} is full ({text})"
        text = f"could not save {directory}: {text.splitlines()[0][:500]}"
        raise CheckpointError(text) from error


def _run_in(directory: Path) -> str:
    """The run whose steps a directory holds; empty if it is not written there."""
    try:
        text = (directory / RUN_ID).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return text if re.fullmatch("[0-9a-f]{32}", text) else ""


def check_run(path: Path, body: dict[str, Any]) -> None:
    """Raise `MismatchError` if a step lies in the directory of another run."""
    owner = _run_in(path.parent)
    if owner and body["run"] != owner and _STEP.fullmatch(path.name.removesuffix(REPLACED)):
        raise MismatchError(
            f"{path} is a step of another run, {body['run'] or 'unnamed'}; the directory's "
            f"{RUN_ID} names {owner}. Move the step elsewhere, and load it from there by its path."
        )


@functools.cache
def _finish_before_the_end() -> None:
    # When a program ends, Python first forbids new work in thread pools, which orbax needs, and
    # only then waits for threads: a save under way would fail. Hooks run last in, first out; so
    # with orbax (and its pools) imported first, this one waits before that.
    import orbax.checkpoint  # noqa: F401

    register = threading._register_atexit  # pyright: ignore[reportAttributeAccessIssue]
    register(lambda: [checkpointer.wait() for checkpointer in list(_UNDER_WAY)])
