"""When things happen in a run, counted in iterations."""

from __future__ import annotations

import math
import sys
from typing import Any

from jaxroll.train.options import Options

SECONDS_PER_DISPATCH = 0.5  # how long a signal may have to wait
MIN_ROWS = 50  # of a run without a log_interval, which also has one for each second


class Schedule:
    """The iterations of rows, evaluations and checkpoints.

    Args:
      agent: says how many environment steps an iteration has.
      options: their intervals are rounded up to iterations.
    """

    def __init__(self, agent: Any, options: Options):
        self.agent = agent
        self._first = (0, agent.prefilled_steps)  # an iteration, and the steps taken until then
        log_interval = options.log_interval or options.num_train_steps / MIN_ROWS
        intervals = (log_interval, options.eval_interval, options.checkpoint_interval)
        per_iteration = agent.steps_per_iteration
        self.log_every, self.eval_every, self.save_every = (
            None if steps is None else math.ceil(steps / per_iteration) for steps in intervals
        )

    def begin(self, iteration: int, steps: int) -> None:
        """Count on from a state: what was done before may have had iterations of another size."""
        self._first = (iteration, steps)

    def steps(self, iteration: int) -> int:
        """Environment steps after so many iterations."""
        first, steps = self._first
        return steps + (iteration - first) * self.agent.steps_per_iteration

    def iterations(self, steps: int) -> int:
        """Iterations that reach at least so many environment steps."""
        first, done = self._first
        return first + max(0, math.ceil((steps - done) / self.agent.steps_per_iteration))

    def is_log(self, iteration: int) -> bool:
        """Whether a row ends here, by steps."""
        return _divides(self.log_every, iteration) or self.is_eval(iteration)

    def is_eval(self, iteration: int) -> bool:
        """Whether the row that ends here has an evaluation."""
        return _divides(self.eval_every, iteration)

    def is_save(self, iteration: int) -> bool:
        """Whether a checkpoint is due, by steps."""
        return _divides(self.save_every, iteration)

    def until_next(self, iteration: int) -> int:
        """Iterations until something has to happen."""
        every = (self.log_every, self.eval_every, self.save_every)
        return min((n - iteration % n for n in every if n), default=sys.maxsize)


def next_pace(pace: int, count: int, seconds: float, *, fixed: bool) -> int:
    """How many iterations the next dispatch may have, for one to take about half a second."""
    if fixed:  # processes must agree, and their clocks do not
        return 16
    if count < pace:
        return pace
    wanted = int(count * SECONDS_PER_DISPATCH / max(seconds, 1e-4))
    return max(1, min(wanted, 4 * pace))


def _divides(every: int | None, iteration: int) -> bool:
    return every is not None and iteration % every == 0
