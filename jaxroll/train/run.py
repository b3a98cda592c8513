"""A run under way: its program, files, clock and signals, and where it is."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import parallel
from jaxroll.counts import count_value
from jaxroll.train import signals
from jaxroll.train.checkpoint import Checkpointer
from jaxroll.train.history import History
from jaxroll.train.lock import RunLock
from jaxroll.train.logging import Loggers, make_loggers
from jaxroll.train.options import Options
from jaxroll.train.preflight import Start, check_new, check_resumable, check_same_run, has_steps
from jaxroll.train.programs import make_program, read_metrics
from jaxroll.train.progress import Progress
from jaxroll.train.schedule import Schedule, next_pace
from jaxroll.train.states import BEST_KEY, describe, policy_of

SECONDS_PER_ROW = 1.0  # at most, where no interval of steps is given


class Run:
    """What hooks see and change.

    Attributes:
      agent: what is trained.
      options: the values of `train`.
      start: its objects.
      carry: {"state", "metrics"} on the devices.
      iteration: how many are done, those before a resume included; `total`: of the whole run.
      step: environment steps so far.
      numbers: what `read_metrics` read after the last dispatch.
      ends_row: whether the metrics up to here are a row, and start at zero again.
      row: the columns of the row that ends here; {}: none does.
      stop: why the run stops here; None: it goes on.
      cut_episodes: episodes of host environments that a resume cut, in no whole row yet.
    """

    def __init__(self, agent: Any, options: Options, start: Start):
        self.agent, self.options, self.start = agent, options, start
        self.schedule = Schedule(agent, options)
        self.is_primary = jax.process_index() == 0
        self.history = History()
        self.progress = Progress(
            options.num_train_steps,
            description=f"{agent.name} {agent.env_name}",
            mode=options.progress,  # pyright: ignore[reportArgumentType]
            enabled=self.is_primary,
        )
        self.metadata = {**describe(agent), "seed": options.seed, **(start.config or {})}
        self.checkpointer: Checkpointer | None = None
        self.logger: Loggers | None = None
        self._lock: RunLock | None = None
        self.row: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self.stop: str | None = None
        self.ends_row = self.is_save_due = self.has_warned = False
        self.is_evaluating_host = False
        self._pace, self._seconds = 1, 0.0  # iterations of the next dispatch, time of the last

    # Where it is.

    @property
    def state(self) -> Any:
        """The current TrainState; the next dispatch destroys it."""
        return self.carry["state"]

    @property
    def step(self) -> int:
        """Environment steps so far."""
        return self.schedule.steps(self.iteration)

    @property
    def at_end(self) -> bool:
        """Whether all steps are done."""
        return self.iteration >= self.total

    def seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._elapsed + time.monotonic() - self._began

    def newest_on_disk(self) -> int | None:
        """The step of the newest checkpoint, when what is being saved is done."""
        if self.checkpointer is None:
            return None
        self.checkpointer.wait()
        return self.checkpointer.latest_step()

    # From its beginning to its end.

    def open(self, stack: contextlib.ExitStack) -> None:
        """Make the directory this run's and start the program; undone when the stack is closed."""
        start, options = self.start, self.options
        directory = start.checkpoint_dir
        self._restores = bool(directory and start.resume and has_steps(directory / "checkpoints"))
        self._policy: dict[str, Any] = {}
        if options.init_model_path is not None and not self._restores:
            self._policy = policy_of(self.agent, options.init_model_path)
        if directory is not None:
            self.checkpointer = Checkpointer(
                directory / "checkpoints",
                keep_latest=options.keep_checkpoints,
                keep_best=options.keep_best,
                best_key=BEST_KEY,
            )
            self._claim(stack, directory, self.checkpointer)
            stack.callback(self.checkpointer.wait)
        if self.is_primary and not self._restores:
            start.on_begin()
        self.program = make_program(self.agent, start.mesh, options.reduction)
        stack.callback(self.program.close)
        stack.enter_context(self.progress)
        last_words = functools.partial(_last_words, self.progress, self.checkpointer, directory)
        self.interrupts = stack.enter_context(signals.interrupts(last_words, start.own_process))
        self.interrupts.can_leave = lambda: self.program.is_collecting or self.is_evaluating_host
        # Entered last: the rest of the stack would wait for a peer that is gone.
        stack.enter_context(parallel.peer_guard(own_process=self.interrupts.own_process))
        self._begin(stack)

    def _claim(
        self, stack: contextlib.ExitStack, directory: Path, checkpointer: Checkpointer
    ) -> None:
        if self.start.resume:
            check_resumable(directory)
        if self.is_primary:
            self._lock = stack.enter_context(RunLock(directory))
            checkpointer.check_writable()
        if not self.start.resume:
            check_new(directory)

    def _begin(self, stack: contextlib.ExitStack) -> None:
        """Make or restore the state, open the loggers where it goes on, compile."""
        self.progress.status("compiling")
        self._began = self.last_save_time = time.monotonic()
        before = self._make_carry()
        self._elapsed = float(before.get("elapsed", 0.0))
        self.iteration = int(np.asarray(self.state.learner.iteration).flat[0])
        taken = int(np.asarray(count_value(self.state.learner.num_env_steps)).flat[0])
        if not taken and self.iteration:  # the agent does not keep count
            taken = self.schedule.steps(self.iteration)
        self.schedule.begin(self.iteration, taken)
        self.total = self.schedule.iterations(self.options.num_train_steps)
        self._saved = self.iteration if self.start.resume else -1
        if self.cut_episodes:
            self.progress.message(
                f"{self.cut_episodes} running episodes of host environments were truncated"
            )
        if self.is_primary:
            self._open_logs(stack, has_partial=before.get("partial_row", False))
        if not self.at_end:
            self.carry = self.program.advance(self.carry, 0)  # no row's fps counts compiling
            self.carry, _ = read_metrics(self.carry, reset=False)
            if not self.interrupts.own_process:
                self.interrupts.check()  # of a signal whose exception a collection swallowed
        self.last_row_time, self.last_row_step = time.monotonic(), self.step
        resumed = self._restores or self.start.state is not None
        self.progress.begin(self.step, resumed=resumed)

    def _make_carry(self) -> dict[str, Any]:
        """A new carry, one from a state, or a restored one; what was saved beside it."""
        program, state = self.program, self.start.state
        if state is not None:
            state, self.cut_episodes = program.resume(program.place(jax.tree.map(jnp.copy, state)))
            self.carry = program.start(state)
            return {}
        fresh = program.init(self.options.seed)
        if self._policy:
            fresh = program.place(fresh.replace(learner=fresh.learner.replace(**self._policy)))
        self.carry, self.cut_episodes = program.start(fresh), 0
        if not self._restores or self.checkpointer is None:
            return {}
        _, carry, metadata = self.checkpointer.restore(
            self.carry, shardings=program.shardings(self.carry)
        )
        before = metadata["config"]
        check_same_run(before, self.metadata)
        state, cut = program.resume(carry["state"])
        self.carry = {**carry, "state": state}
        self.cut_episodes = cut + int(before.get("cut_episodes", 0))
        return before

    def _open_logs(self, stack: contextlib.ExitStack, *, has_partial: bool) -> None:
        start = self.start
        if self._restores:
            start.on_begin()
        # A row that a longer run would not have is written again when it is whole.
        kept = self.step - (has_partial and not self.at_end)
        kept = kept if start.resume and self.iteration else -1
        directory = start.checkpoint_dir
        self.logger = make_loggers(self.options.loggers, directory, resume_from_step=kept)
        stack.callback(self.logger.close)
        if start.resume and directory is not None:
            for row in History.read(directory / "metrics.jsonl"):
                self.history.append(row)

    def advance(self) -> None:
        """One dispatch: some iterations, and the metrics read."""
        left = self.total - self.iteration
        count = min(self.schedule.until_next(self.iteration), left, self._pace)
        dispatched = time.monotonic()
        try:
            self.carry = self.program.advance(self.carry, count)
        except (KeyboardInterrupt, SystemExit):
            if self.interrupts.received is None or self.program.left is None:
                raise
            self.carry, count = self.program.left  # an environment hangs: save what was before it
        self.iteration += count
        self.interrupts.nothing_to_save = False
        self.row, self.ends_row = {}, self.schedule.is_log(self.iteration)
        if self.options.log_interval is None:
            # The program may still run: it is expected to take as long as the last one did.
            is_late = dispatched + self._seconds - self.last_row_time >= SECONDS_PER_ROW
            self.ends_row |= self.at_end or bool(parallel.process_max(int(is_late)))
        self.carry, self.numbers = read_metrics(self.carry, reset=self.ends_row)
        self._seconds = time.monotonic() - dispatched
        fixed = jax.process_count() > 1
        self._pace = next_pace(self._pace, count, self._seconds, fixed=fixed)

    def save(self) -> None:
        """Write a checkpoint of this step."""
        self._saved, self.last_save_time = self.iteration, time.monotonic()
        if self.checkpointer is None:
            return
        if self._lock is not None and self._lock.renew():
            self.start.on_begin()  # the directory was deleted: the config comes back
        if self.logger is not None:
            self.logger.sync()  # no checkpoint counts a row that a power cut may take
        self.checkpointer.save(
            self.step,
            self.carry,
            config={
                **self.metadata,
                "elapsed": self.seconds(),
                "cut_episodes": self.cut_episodes,
                "partial_row": "partial" in self.row,
            },
            metrics={BEST_KEY: np.mean(self.row[BEST_KEY])} if BEST_KEY in self.row else {},
        )

    def finish(self) -> None:
        """Save what is not saved yet, and say in the history how the run ended."""
        if self._saved != self.iteration:
            self.save()
        self.history.stopped_by = self.stop or "steps"
        self.history.stopped_at = self.step
        self.history.saved_step = self.newest_on_disk()


def _last_words(
    progress: Progress, checkpointer: Checkpointer | None, directory: Any, name: str
) -> None:
    """Before a hard end: the bar's line put right, and what is on disk."""
    progress.close(failed=True)
    if jax.process_index():
        return
    saved = None if checkpointer is None else checkpointer.latest_step()
    text = f"step {saved:,} is on disk. Go on with: jaxroll resume {directory}" if saved else ""
    text = text or "nothing is on disk to go on with."
    print(f"jaxroll: ended by {name} without a save; {text}", file=sys.stderr)
