"""A run under way: where it is, its program, files, clock and signals."""

from __future__ import annotations

import contextlib
import math
import sys
import time
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
from jaxroll.train.preflight import Start, check_new, check_resumable, check_same_run
from jaxroll.train.programs import make_program, read_metrics
from jaxroll.train.progress import Progress
from jaxroll.train.states import BEST_KEY, describe, policy_of

MIN_ROWS = 50  # where no log_interval is given
SECONDS_PER_ROW = 1.0  # at most, there
SECONDS_PER_DISPATCH = 0.5  # how long a signal may have to wait


class Run:
    """What `train` drives, and hooks see and change.

    Attributes:
      agent: what is trained.
      options: the values of `train`.
      start: its objects.
      carry: {"state", "metrics"} on the devices.
      iteration: how many are done, those before a resume included; `total`: of the whole run.
      numbers: what `read_metrics` read after the last dispatch.
      ends_row: whether the metrics up to here are a row, and start at zero again.
      row: the columns of the row that ends here; {}: none does.
      stop: why the run stops here; None: it goes on.
      cut_episodes: episodes of host environments that a resume cut, in no whole row yet.
    """

    def __init__(self, agent: Any, options: Options, start: Start):
        self.agent, self.options, self.start = agent, options, start
        intervals = {
            "log": options.log_interval or options.num_train_steps / MIN_ROWS,
            "eval": options.eval_interval,
            "save": options.checkpoint_interval,
        }
        per_iteration = agent.steps_per_iteration
        self._every = {k: math.ceil(x / per_iteration) for k, x in intervals.items() if x}
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
        self._policy: dict[str, Any] = {}
        self.row: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self.stop: str | None = None
        self.ends_row = self.is_save_due = self.has_warned = False
        self.is_evaluating_host = self._restores = False
        self._pace, self._seconds = 1, 0.0  # iterations of the next dispatch, time of the last

    # Where it is.

    @property
    def state(self) -> Any:
        """The current TrainState; the next dispatch destroys it."""
        return self.carry["state"]

    @property
    def step(self) -> int:
        """Environment steps so far; before a resume, iterations may have had another size."""
        first, steps = self._first
        return steps + (self.iteration - first) * self.agent.steps_per_iteration

    @property
    def at_end(self) -> bool:
        """Whether all steps are done."""
        return self.iteration >= self.total

    def is_due(self, *names: str) -> bool:
        """Whether one of "log", "eval" and "save" is due here, by its interval of steps."""
        return any(k in self._every and self.iteration % self._every[k] == 0 for k in names)

    def seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._elapsed + time.monotonic() - self._began

    def newest_on_disk(self) -> int | None:
        """The step of the newest checkpoint, when what is being saved is done."""
        if self.checkpointer is None:
            return None
        self.checkpointer.wait()
        return self.checkpointer.latest_step()

    # What `train` calls, in this order; what is opened is closed by the stack.

    def claim_directory(self, stack: contextlib.ExitStack) -> None:
        """Lock the directory, unless what is in it, or the policy to start from, does not fit."""
        start, options, directory = self.start, self.options, self.start.checkpoint_dir
        if directory is not None:
            self.checkpointer = Checkpointer(
                directory / "checkpoints",
                keep_latest=options.keep_checkpoints,
                keep_best=options.keep_best,
                best_key=BEST_KEY,
            )
            # Steps that are all damaged count, to be an error.
            self._restores = start.resume and bool(self.checkpointer.numbers())
        if options.init_model_path is not None and not self._restores:
            self._policy = policy_of(self.agent, options.init_model_path)
        if directory is not None and self.checkpointer is not None:
            if start.resume:
                check_resumable(directory)
            if self.is_primary:
                self._lock = stack.enter_context(RunLock(directory))
                self.checkpointer.check_writable()
            if not start.resume:
                check_new(directory, self.checkpointer)
            stack.callback(self.checkpointer.wait)
        if self.is_primary and not self._restores:
            start.on_begin()

    def open_program(self, stack: contextlib.ExitStack) -> None:
        """Open the environments and the progress bar; from here on signals are noted."""
        self.program = make_program(self.agent, self.start.mesh, self.options.reduction)
        stack.callback(self.program.close)
        stack.enter_context(self.progress)
        self.interrupts = stack.enter_context(
            signals.interrupts(self._say_ended, self.start.own_process)
        )
        self.interrupts.can_leave = lambda: self.program.is_collecting or self.is_evaluating_host
        # Entered last: the rest of the stack would wait for a peer that is gone.
        stack.enter_context(parallel.peer_guard(own_process=self.interrupts.own_process))

    def make_state(self) -> None:
        """Make a new state, copy the one that was given, or restore the newest checkpoint."""
        self.progress.status("compiling")
        self._began = self.last_save_time = time.monotonic()
        program, given, self.cut_episodes = self.program, self.start.state, 0
        if given is not None:
            state = program.place(jax.tree.map(jnp.copy, given))
            state, self.cut_episodes = program.resume(state)
        else:
            state = program.init(self.options.seed)
            if self._policy:
                state = program.place(state.replace(learner=state.learner.replace(**self._policy)))
        self.carry = program.start(state)
        before = self._restore(self.checkpointer) if self.checkpointer and self._restores else {}
        self._elapsed = float(before.get("elapsed", 0.0))
        self._ends_partial = before.get("partial_row", False)
        learner = self.state.learner
        self.iteration = int(np.asarray(learner.iteration).flat[0])
        per_iteration = self.agent.steps_per_iteration
        taken = int(np.asarray(count_value(learner.num_env_steps)).flat[0])
        if not taken:  # the agent does not keep count
            taken = self.agent.prefilled_steps + self.iteration * per_iteration
        self._first = self.iteration, taken
        left = math.ceil((self.options.num_train_steps - taken) / per_iteration)
        self.total = self.iteration + max(0, left)
        self._saved = self.iteration if self.start.resume else -1

    def _restore(self, checkpointer: Checkpointer) -> dict[str, Any]:
        _, carry, metadata = checkpointer.restore(
            self.carry, shardings=self.program.shardings(self.carry)
        )
        before = metadata["config"]
        check_same_run(before, self.metadata)
        state, cut = self.program.resume(carry["state"])
        self.carry = {**carry, "state": state}
        self.cut_episodes = cut + int(before.get("cut_episodes", 0))
        return before

    def open_logs(self, stack: contextlib.ExitStack) -> None:
        """Open the loggers where the run goes on; rows behind that are written again."""
        if self.cut_episodes:
            self.progress.message(
                f"{self.cut_episodes} running episodes of host environments were truncated"
            )
        if not self.is_primary:
            return
        start, directory = self.start, self.start.checkpoint_dir
        if self._restores:
            start.on_begin()
        # A row that a longer run would not have is written again when it is whole.
        kept = self.step - (self._ends_partial and not self.at_end)
        kept = kept if start.resume and self.iteration else -1
        self.logger = make_loggers(self.options.loggers, directory, resume_from_step=kept)
        stack.callback(self.logger.close)
        if start.resume and directory is not None:
            for row in History.read(directory / "metrics.jsonl"):
                self.history.append(row)

    def compile(self) -> None:
        """Compile what an iteration needs, so that no row's fps counts it."""
        if not self.at_end:
            self.carry = self.program.advance(self.carry, 0)
            self.carry, _ = read_metrics(self.carry, reset=False)
            if not self.interrupts.own_process:
                self.interrupts.check()  # of a signal whose exception a collection swallowed
        self.last_row_time, self.last_row_step = time.monotonic(), self.step
        self.progress.begin(self.step, resumed=self._restores or self.start.state is not None)

    def advance(self) -> None:
        """One dispatch: some iterations, and the metrics read."""
        until_next = min(n - self.iteration % n for n in self._every.values())
        count = min(until_next, self.total - self.iteration, self._pace)
        dispatched = time.monotonic()
        try:
            self.carry = self.program.advance(self.carry, count)
        except (KeyboardInterrupt, SystemExit):
            if self.interrupts.received is None or self.program.left is None:
                raise
            self.carry, count = self.program.left  # an environment hangs: save what was before it
        self.iteration += count
        self.interrupts.nothing_to_save = False
        self.row, self.ends_row = {}, self.is_due("log", "eval")
        if self.options.log_interval is None:
            # The program may still run: it is expected to take as long as the last one did.
            is_late = dispatched + self._seconds - self.last_row_time >= SECONDS_PER_ROW
            self.ends_row |= self.at_end or bool(parallel.process_max(int(is_late)))
        self.carry, self.numbers = read_metrics(self.carry, reset=self.ends_row)
        self._seconds = time.monotonic() - dispatched
        self._pace = next_pace(self._pace, count, self._seconds)

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

    def _say_ended(self, name: str) -> None:
        """Before a hard end: the bar's line put right, and what is on disk."""
        self.progress.close(failed=True)
        if not self.is_primary:
            return
        saved = None if self.checkpointer is None else self.checkpointer.latest_step()
        text = "nothing is on disk to go on with."
        if saved:
            directory = self.start.checkpoint_dir
            text = f"step {saved:,} is on disk. Go on with: jaxroll resume {directory}"
        print(f"jaxroll: ended by {name} without a save; {text}", file=sys.stderr)


def next_pace(pace: int, count: int, seconds: float) -> int:
    """How many iterations the next dispatch may have, for one to take about half a second."""
    if jax.process_count() > 1:  # processes must agree, and their clocks do not
        return 16
    if count < pace:
        return pace
    wanted = int(count * SECONDS_PER_DISPATCH / max(seconds, 1e-4))
    return max(1, min(wanted, 4 * pace))
