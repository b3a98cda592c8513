"""The steps of a run: saved beside the training, pruned, found again.

A save copies the arrays and returns; a thread writes them. Only one save is under way at a time:
the next waits for it. What goes wrong is tried again, then recorded and warned of, and the
program goes on.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import re
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxroll.checkpoints import manifest
from jaxroll.checkpoints.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedError,
    NoCheckpointError,
    SaveError,
)
from jaxroll.checkpoints.processes import together
from jaxroll.checkpoints.steps import (
    DELETING,
    SAVING,
    Snapshot,
    find,
    metadata_of,
    read_step,
    remove,
    take_snapshot,
    write_step,
)
from jaxroll.types import PyTree

_STEP = re.compile(r"\d{10,19}")
_LEFTOVER = re.compile(rf"\d{{10,19}}({re.escape(SAVING)}|{re.escape(DELETING)})")
_INSTANCES = itertools.count()
_UNDER_WAY: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class Restored(NamedTuple):
    """What `restore` gives back."""

    step: int
    state: PyTree
    metadata: dict[str, Any]  # config, metrics, step, created, jaxroll_version, format_version


class Checkpointer:
    """Saves and restores the states of one run in a directory.

    With several processes every method but `steps` is collective, and the directory is shared.

    Args:
      directory: where the steps go; made by the first save.
      keep_latest: how many of the newest steps stay; None keeps all.
      keep_best: how many of the best by `best_key` stay beside them.
      best_key: the entry of `metrics` that says how good a step is; None: no best.
      best_mode: whether "max" or "min" is best.
      asynchronous: write in a thread; a program that ends meanwhile waits for it.
      retries: how often a failed save is tried again, after `retry_seconds`, then twice that, …
      strict: raise `SaveError` for a failed save (at the next `save` or `wait`) instead of warning.

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
        asynchronous: bool = True,
        retries: int = 2,
        retry_seconds: float = 0.5,
        strict: bool = False,
    ):
        if keep_latest is not None and keep_latest < 1:
            raise ValueError(f"keep_latest must be at least 1 (or None for all), got {keep_latest}")
        if keep_best < 0:
            raise ValueError(f"keep_best must be at least 0, got {keep_best}")
        if best_mode not in ("max", "min"):
            raise ValueError(f'best_mode must be "max" or "min", got {best_mode!r}')
        self.directory = Path(directory)
        self.errors: list[CheckpointError] = []
        self._keep_latest, self._keep_best = keep_latest, keep_best
        self._best_key, self._best_mode = best_key, best_mode
        self._asynchronous, self._strict = asynchronous, strict
        self._retries, self._retry_seconds = retries, retry_seconds
        self._thread: threading.Thread | None = None
        self._num_reported = 0
        self._damaged: set[int] = set()  # found by restore; they count for nothing when pruning
        # The same on every process, since all make and use their checkpointers alike.
        self._tags = (f"run/{i}/{n}" for i in [next(_INSTANCES)] for n in itertools.count())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.wait()

    # ---- writing

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
        step = operator.index(step)
        if not 0 <= step < 10**18:
            raise ValueError(f"step must be in [0, 10**18), got {step}")
        self._join()
        self._report()
        scores = {name: float(value) for name, value in (metrics or {}).items()}
        snapshot = take_snapshot(step, state, config or {}, scores)
        tag = next(self._tags)
        if self._asynchronous:
            _finish_before_the_end()
            _UNDER_WAY.add(self)
            self._thread = threading.Thread(
                target=self._write, args=(snapshot, tag), name=f"save-{step}"
            )
            self._thread.start()
        else:
            self._write(snapshot, tag)
            self._report()

    def check_writable(self) -> None:
        """Make the directory, or say with a `CheckpointError` why no step can be saved there.

        Of several processes, the first may call it alone.
        """
        probe = self.directory / f".{os.getpid()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be saved in {self.directory}: {error}. Make it a directory "
                "that can be written to, or choose another."
            ) from error

    def wait(self) -> bool:
        """Wait for the save under way; whether everything since the last report went well.

        Failures are warned of (raised if `strict`), each once.
        """
        self._join()
        return self._report()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _report(self) -> bool:
        new, self._num_reported = self.errors[self._num_reported :], len(self.errors)
        for error in new:
            if self._strict:
                raise error
            # Here and not in the thread, where a filter that raises would go unseen.
            warnings.warn(f"{error}. The program goes on.", CheckpointWarning, stacklevel=3)
        return not new

    def _write(self, snapshot: Snapshot, tag: str) -> None:
        step = snapshot.body["step"]
        for attempt in range(self._retries + 1):
            try:
                write_step(self._path(step), snapshot, f"{tag}/{attempt}")
                break
            except SaveError as error:
                if attempt == self._retries:
                    self.errors.append(error)
                    return
                time.sleep(self._retry_seconds * 2**attempt)
        self._damaged.discard(step)
        try:
            together(f"{tag}/prune", lambda: self._prune(step), primary_only=True)
        except (OSError, CheckpointError) as error:
            failure = CheckpointError(f"could not delete old steps: {error}")
            failure.__cause__ = error
            self.errors.append(failure)

    def _prune(self, just_saved: int) -> None:
        """Delete what need not stay. The successor is complete, so nothing is lost by a kill."""
        entries = list(self.directory.iterdir())
        for path in entries:
            if _LEFTOVER.fullmatch(path.name):
                remove(path)
        scores = self._scores()
        good = [step for step in scores if step not in self._damaged]
        keep = {just_saved, *(good if self._keep_latest is None else good[-self._keep_latest :])}
        keep.update(self._best({step: scores[step] for step in good})[: self._keep_best])
        for path in entries:
            if not _STEP.fullmatch(path.name) or int(path.name) in keep:
                continue
            if int(path.name) in scores or not _is_foreign(path):
                deleting = path.with_name(path.name + DELETING)
                path.rename(deleting)
                remove(deleting)

    # ---- reading

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
        self, like: PyTree, *, step: int | None = None, shardings: PyTree = None
    ) -> Restored:
        """The newest intact state, or that of a step, verified bit by bit.

        A damaged step is named in a warning and skipped for the one before; if it was asked for
        by `step`, it is an error.

        Args:
          like: a tree of the same structure; of arrays, or of `jax.ShapeDtypeStruct`s (as from
            `jax.eval_shape`), perhaps with shardings. Numpy leaves come back as numpy.
          step: which one; None: the newest.
          shardings: a tree of shardings that may stop higher up than `like` (or one sharding for
            all); it goes before the shardings of `like`, and need not be what was saved with.
        """
        return self.restore_subtree(like, "", step=step, shardings=shardings)

    def restore_subtree(
        self, like: PyTree, subtree: str, *, step: int | None = None, shardings: PyTree = None
    ) -> Restored:
        """As `restore`, but only what is saved below a path, for instance "shared/params"."""
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
        path = find(self._path(chosen))
        body = manifest.read(path)
        state = read_step(path, body, like, tag=tag, subtree=subtree, shardings=shardings)
        return Restored(chosen, state, metadata_of(body))

    def _choose(self, step: int | None) -> tuple[int, list[tuple[int, str]]]:
        """The newest step that verifies, and what is wrong with those after it."""
        if step is not None:
            self._verify(step)
            return step, []
        damage: list[tuple[int, str]] = []
        for number in sorted(self._numbers(), reverse=True):
            try:
                self._verify(number)
            except (DamagedError, NoCheckpointError) as error:
                damage.append((number, str(error)))
                continue
            return number, damage
        if damage:
            listed = "\n".join(f"  {problem}" for _, problem in damage)
            raise DamagedError(f"{self.directory} holds no intact step:\n{listed}")
        raise NoCheckpointError(f"{self.directory} holds no checkpoint")

    def _verify(self, step: int) -> None:
        path = find(self._path(step))
        body = manifest.read(path)
        if body["step"] != step:
            raise DamagedError(f"{path} says that it is step {body['step']}")
        manifest.verify(path, body)

    # ---- names

    def _path(self, step: int) -> Path:
        return self.directory / f"{step:010d}"

    def _numbers(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        names = {path.name.removesuffix(SAVING) for path in self.directory.iterdir()}
        found = [name for name in names if _STEP.fullmatch(name)]
        return sorted(int(name) for name in found if find(self.directory / name).exists())

    def _scores(self) -> dict[int, float | None]:
        """Every step with a right manifest, oldest first, with its `best_key` metric."""
        scores: dict[int, float | None] = {}
        for number in self._numbers():
            try:
                body = manifest.read(find(self._path(number)))
            except CheckpointError:
                continue
            scores[number] = body["metrics"].get(self._best_key)
        return scores

    def _best(self, scores: dict[int, float | None]) -> list[int]:
        """Steps from best to worst; without a number there is no place."""
        sign = 1.0 if self._best_mode == "max" else -1.0
        rated = {
            step: (sign * score, step)
            for step, score in scores.items()
            if isinstance(score, float) and not math.isnan(score)
        }
        return sorted(rated, key=rated.__getitem__, reverse=True)


def _is_foreign(path: Path) -> bool:
    """Whether a step is whole in a way that this version cannot read: not ours to delete."""
    try:
        manifest.read(path)
    except (DamagedError, NoCheckpointError):
        return False
    except CheckpointError:
        return True
    return False


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
