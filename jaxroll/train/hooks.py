"""Hooks of a run: functions of the `Run` that are called after each dispatch, in `HOOKS`' order."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any

import jax
import numpy as np

from jaxroll import metrics as metrics_lib, parallel
from jaxroll.counts import count_value
from jaxroll.envs import HostEnv, HostEnvSpec
from jaxroll.train.evaluation import NonFiniteError, evaluation_columns
from jaxroll.train.run import Run
from jaxroll.train.states import BEST_KEY

# Between checkpoints, where no interval of steps is given: what a kill may cost.
SECONDS_BETWEEN_SAVES = 300.0
# Why a run ends before its steps are done; of two processes' reasons, the later one counts.
STOPS = (None, "time_budget", "callback", "target_return", "SIGINT", "SIGHUP", "SIGTERM")


@dataclasses.dataclass(frozen=True)
class Event:
    """What a callback gets after each log row."""

    step: int  # environment steps so far
    row: dict[str, Any]  # what was logged
    state: Any  # the TrainState; copy it (jax.tree.map(jnp.copy, state)) to keep it
    agent: Any


def check_finite(run: Run) -> None:
    """Stop at a loss or gradient that is not finite, with the leaves that it is in."""
    counts = run.numbers["metrics"]["nonfinite"].total
    counts = counts.reshape(-1, counts.shape[-1]).sum(0)  # over the members of a sweep
    if run.options.nonfinite == "skip" or not counts.any():
        return
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(run.state.learner.params)
    ]
    bad = [name for name, count in zip(names, counts) if count]
    shown = ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
    kept = "nothing was saved before it: set checkpoint_dir and checkpoint_interval"
    if (last := run.newest_on_disk()) is not None:
        kept = f"the last checkpoint, of step {last}, is finite"
    raise NonFiniteError(
        f"the loss or its gradient was not finite by step {run.step}, in {len(bad)} of "
        f"{len(names)} leaves: {shown}. It was not applied; {kept}. Lower the learning rate, look "
        "for NaN in observations and rewards and for logits that are all −inf, or use "
        'nonfinite="skip".'
    )


def measure(run: Run) -> None:
    """Make the row that ends here."""
    if not (run.ends_row or run.at_end):
        return
    numbers = metrics_lib.compute(run.numbers["metrics"])
    counts = np.asarray(numbers.pop("nonfinite", 0))
    numbers["skipped_updates"] = counts.max(-1, initial=0).tolist()
    numbers.pop("episodes", None)
    now = time.monotonic()
    run.row = {
        "step": run.step,
        "episode": count_value(run.numbers["num_episodes"]),
        **numbers,
        "total_time": run.seconds(),
        "fps": (run.step - run.last_row_step) / max(now - run.last_row_time, 1e-9),
    }
    if run.cut_episodes:
        run.row["cut_episodes"] = run.cut_episodes
    if run.ends_row:
        run.cut_episodes = 0
    else:
        run.row["partial"] = True  # a longer run will have a whole row here instead
    lost = int(np.sum(run.row.get("final_overflow", 0)))
    if lost and not run.has_warned:
        run.has_warned = True
        warnings.warn(
            f"{lost} truncated steps by step {run.step} bootstrapped from V(obs) instead of "
            "V(final observation): more than max_truncations, or than the environment's time_limit "
            "allows. Leave out max_truncations, or correct time_limit. Further ones are counted as "
            "final_overflow.",
            stacklevel=3,
        )


def evaluate(run: Run) -> None:
    """Add an evaluation to the row, where one is due."""
    options = run.options
    if options.eval_interval is None or not run.row:
        return
    if not (run.is_due("eval") or run.at_end):
        return
    run.progress.update(run.step)
    run.progress.status("evaluating")
    env = run.start.eval_env or run.agent.env
    run.is_evaluating_host = isinstance(env, HostEnv | HostEnvSpec)
    try:
        run.row |= evaluation_columns(
            run.agent,
            run.state,
            options.seed,
            run.iteration,
            options.num_eval_episodes,
            run.start.eval_env,
            options.reduction == "fast",
        )
    except (KeyboardInterrupt, SystemExit):
        # An environment hangs: the run ends with a row and a checkpoint without the evaluation.
        if run.interrupts.received is None or not run.is_evaluating_host:
            raise
    finally:
        run.is_evaluating_host = False


def log(run: Run) -> None:
    """Give the row to history, loggers and the progress bar."""
    if not run.row:
        run.progress.update(run.step)
        return
    run.last_row_time, run.last_row_step = time.monotonic(), run.step
    rows, members = [run.row], getattr(run.agent, "members", None)
    if members is not None:  # a sweep: one row for each member, with the columns that tell them
        # apart. A swept learning rate is the member's column, not the metric of the same name.
        rows = [
            columns | {k: v[i] if np.ndim(v) else v for k, v in run.row.items() if k not in columns}
            for i, columns in enumerate(members)
        ]
    for row in rows:
        run.history.append(row)
        if run.logger is not None:
            run.logger(row)
    run.progress.update(run.step, episode_return=run.row.get("episode_return"))


def check_stop(run: Run) -> None:
    """Stop for a signal, a return that was reached, a callback or the clock; all processes do."""
    options, stop = run.options, None
    if run.row:
        reached = run.row.get(BEST_KEY if options.eval_interval else "episode_return")
        if options.target_return is not None and reached is not None:
            stop = "target_return" if np.mean(reached) >= options.target_return else None
        event = Event(step=run.step, row=run.row, state=run.state, agent=run.agent)
        if sum(bool(callback(event)) for callback in run.start.callbacks):
            stop = stop or "callback"
    if options.time_budget is not None and run.seconds() >= options.time_budget:
        stop = stop or "time_budget"
    is_due = run.checkpointer is not None and options.checkpoint_interval is None
    is_due = is_due and time.monotonic() - run.last_save_time >= SECONDS_BETWEEN_SAVES
    # Clocks and callbacks differ between processes; what they do at a step must not.
    agreed = parallel.process_max(2 * STOPS.index(run.interrupts.name or stop) + is_due)
    run.stop, run.is_save_due = STOPS[agreed // 2], bool(agreed % 2)


def save(run: Run) -> None:
    """Write a checkpoint, where one is due or the run ends."""
    is_rated = run.options.keep_best > 0 and BEST_KEY in run.row
    is_due = run.is_save_due or run.is_due("save") or is_rated
    if is_due or run.stop or run.at_end:
        run.save()


HOOKS = (check_finite, measure, evaluate, log, check_stop, save)
