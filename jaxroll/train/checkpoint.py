"""Checkpoints: the steps of a run, saved beside the training, pruned, and found again.

A save copies the arrays and returns; a thread writes them, one save at a time. A save that fails is
tried again, then warned of, and the program goes on. See `step_files` for what is on the disk.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import threading
import time
import uuid
import warnings
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from jaxroll.checks import check_count, check_path
from jaxroll.train import step_files
from jaxroll.train.files import replace_file
from jaxroll.train.step_files import (
    CheckpointError,
    DamagedError,
    MismatchError as MismatchError,  # for importers of this module
    NoCheckpointError,
    find,
)
from jaxroll.types import PyTree

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
        snapshot = step_files.take_snapshot(state, {} if config is None else config, step, scores)
        _UNDER_WAY.add(self)
        # No daemon: a program that ends waits for it.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, next(step_files.TAGS)), name=f"save-{step}"
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

    def _write(self, snapshot: step_files.Snapshot, tag: str) -> None:
        step = snapshot.manifest["step"]
        for attempt in range(self._retries + 1):
            try:
                step_files.write_step(self._path(step), snapshot, f"{tag}/{attempt}", self._own_run)
                break
            except CheckpointError as error:
                if attempt == self._retries:
                    self.errors.append(error)
                    return
                time.sleep(self._retry_seconds * 2**attempt)
        self._damaged.discard(step)
        try:
            step_files.together(f"{tag}/prune", lambda: self._prune(step), primary_only=True)
        except (OSError, CheckpointError) as error:
            self.errors.append(CheckpointError(f"could not delete old steps: {error}"))

    def _own_run(self) -> str:
        """The name of the run whose steps are here; written down with the first."""
        path = self.directory / step_files.RUN_ID
        if self._run and not path.exists():
            text = f"{self.directory} was deleted while it was in use: the steps in it are lost"
            self.errors.append(CheckpointError(text))
        if not self._run:
            runs = [body["run"] for body in _intact(self._manifests()).values()]
            known = step_files.run_in(self.directory) or "".join(runs[-1:])
            self._run = known or uuid.uuid4().hex
        if not path.exists():
            replace_file(path, f"{self._run}\n".encode())
        return self._run

    def _prune(self, just_saved: int) -> None:
        """Delete what need not stay. The successor is complete, so a kill loses nothing."""
        for path in list(self.directory.iterdir()):
            is_unfinished = path.suffix in (step_files.WRITING, step_files.DELETING)
            is_replaced = path.suffix == step_files.REPLACED and path.with_suffix("").exists()
            if (is_unfinished or is_replaced) and step_files.STEP_NAME.fullmatch(path.stem):
                shutil.rmtree(path)
        manifests = self._manifests()
        good = {step: x for step, x in _intact(manifests).items() if step not in self._damaged}
        keep = {just_saved, *list(good)[-self._keep_latest :], *self._best(good)[: self._keep_best]}
        for step, found in manifests.items():
            # What is another run's, in another format, or may not be read, is not ours to delete.
            if step not in keep and isinstance(found, dict | DamagedError | NoCheckpointError):
                # Renamed first, so that no half of a step ever has its name.
                path = self._path(step)
                shutil.rmtree(find(path).rename(path.with_suffix(step_files.DELETING)))

    # Reading.

    def numbers(self) -> list[int]:
        """The steps whose directory is there, damaged or not."""
        if not self.directory.is_dir():
            return []
        names = {path.name.removesuffix(step_files.REPLACED) for path in self.directory.iterdir()}
        return sorted(int(name) for name in names if step_files.STEP_NAME.fullmatch(name))

    def steps(self) -> list[int]:
        """The steps whose manifest is right, oldest first; their files are verified on restore."""
        return list(_intact(self._manifests()))

    def latest_step(self) -> int | None:
        """The newest step, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the best `metrics[best_key]` (the later one of equals), or None."""
        return next(iter(self._best(_intact(self._manifests()))), None)

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
        tag = f"{next(step_files.TAGS)}/choose"
        chosen, damage = step_files.together(tag, lambda: self._choose(step), primary_only=True)
        for number, problem in damage:
            self._damaged.add(number)
            warnings.warn(
                f"step {number} is skipped: {problem}. Going back to step {chosen}.",
                CheckpointWarning,
                stacklevel=2,
            )
        path = find(self._path(chosen))
        state, body = step_files.read(path, like, subtree=subtree, shardings=shardings)
        metadata = {k: v for k, v in body.items() if k not in ("leaves", "files", "shards")}
        return Restored(chosen, state, metadata)

    def _choose(self, step: int | None) -> tuple[int, list[tuple[int, str]]]:
        """The newest step that verifies, and what is wrong with those after it."""
        damage: list[tuple[int, str]] = []
        for number in reversed(self.numbers()) if step is None else [step]:
            try:
                step_files.verify(find(self._path(number)))
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

    def _manifests(self) -> dict[int, dict[str, Any] | CheckpointError]:
        """By step, oldest first: its manifest, or what is wrong with it."""
        manifests: dict[int, dict[str, Any] | CheckpointError] = {}
        for number in self.numbers():
            try:
                manifests[number] = step_files.read_manifest(find(self._path(number)))
            except CheckpointError as error:
                manifests[number] = error
        return manifests

    def _best(self, manifests: dict[int, dict[str, Any]]) -> list[int]:
        """Steps from best to worst, without those that have no score."""
        scores = {step: body["metrics"].get(self._best_key) for step, body in manifests.items()}
        rated = [n for n, x in scores.items() if isinstance(x, float) and not math.isnan(x)]
        return sorted(rated, key=lambda step: (scores[step], step), reverse=True)


def _intact(manifests: dict[int, dict[str, Any] | CheckpointError]) -> dict[int, dict[str, Any]]:
    return {step: found for step, found in manifests.items() if isinstance(found, dict)}


@atexit.register
def _report() -> None:
    for checkpointer in list(_UNDER_WAY):
        checkpointer.wait()
