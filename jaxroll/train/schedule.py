"""When things happen in a run: everything is counted in iterations from its start."""

from __future__ import annotations

import math
from typing import Any

SECONDS_PER_DISPATCH = 0.5  # how long a signal may have to wait


class Schedule:
    """The iterations of rows, evaluations and checkpoints.

    Args:
      agent: says how many environment steps an iteration has.
      log_interval: environment steps between rows; all intervals are rounded up to iterations.
      eval_interval: those between evaluations, each of which has a row; None: none.
      checkpoint_interval: those between checkpoints; None: they do not go by steps.
    """

    def __init__(
        self,
        agent: Any,
        log_interval: int,
        eval_interval: int | None,
        checkpoint_interval: int | None,
    ):
        self.agent = agent
        self._first = (0, agent.prefilled_steps)  # an iteration, and the steps taken until then
        self.log_every = self._iterations("log_interval", log_interval)
        self.save_every = self._iterations("checkpoint_interval", checkpoint_interval)
        self.eval_every = self._iterations("eval_interval", eval_interval)

    def _iterations(self, name: str, steps: int | None) -> Any:
        if steps is None:
            return None
        if steps < 1:
            raise ValueError(f"{name} must be at least 1 environment step, got {steps}.")
        return max(1, -(-int(steps) // self.agent.steps_per_iteration))

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
        """Whether a row ends here."""
        return iteration % self.log_every == 0 or self.is_eval(iteration)

    def is_eval(self, iteration: int) -> bool:
        """Whether the row that ends here has an evaluation."""
        return bool(self.eval_every) and iteration % self.eval_every == 0

    def is_save(self, iteration: int) -> bool:
        """Whether a checkpoint is due, by steps."""
        return bool(self.save_every) and iteration % self.save_every == 0

    def until_next(self, iteration: int) -> int:
        """Iterations until something has to happen."""
        every = (self.log_every, self.eval_every, self.save_every)
        return min(n - iteration % n for n in every if n)


def next_pace(pace: int, count: int, seconds: float, *, fixed: bool, run: Schedule) -> int:
    """How many iterations the next dispatch may have, for one to take about half a second."""
    if fixed:  # processes must agree, and their clocks do not
        return max(1, min(run.log_every, 16))
    if count < pace:
        return pace
    wanted = int(count * SECONDS_PER_DISPATCH / max(seconds, 1e-4))
    return max(1, min(wanted, 4 * pace))
