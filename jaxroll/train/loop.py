"""Training: dispatch, evaluation, checkpoints, logs, signals. Knows the agents' protocol only."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxroll import metrics as metrics_lib, parallel
from jaxroll.counts import count_value
from jaxroll.train.checkpoint import Checkpointer
from jaxroll.train.evaluation import NonFiniteError, evaluation_columns
from jaxroll.train.history import History
from jaxroll.train.lock import RunLock
from jaxroll.train.logging import make_loggers
from jaxroll.train.preflight import (
    as_callbacks,
    as_eval_env,
    check_loggers,
    check_new,
    check_options,
    check_resumable,
    check_same_run,
    has_steps,
)
from jaxroll.train.programs import check_traces, make_program, read_metrics
from jaxroll.train.progress import Progress
from jaxroll.train.schedule import Schedule, next_pace
from jaxroll.train.signals import interrupts as signals_of
from jaxroll.train.states import BEST_KEY, describe, policy_of

# Between checkpoints, where no interval of steps is given: what a kill may cost.
SECONDS_BETWEEN_SAVES = 300.0
# Why a run ends before its steps are done; the later goes before the earlier.
STOPS = (None, "time_budget", "callback", "target_return", "SIGINT", "SIGHUP", "SIGTERM")


@dataclasses.dataclass(frozen=True)
class Event:
    """What a callback gets after each log row."""

    step: int  # environment steps so far
    row: dict[str, Any]  # what was logged
    state: Any  # the TrainState; copy it (jax.tree.map(jnp.copy, state)) to keep it
    agent: Any


def train(
    agent: Any,
    num_train_steps: int,
    *,
    seed: int = 0,
    state: Any = None,
    mesh: Mesh | None = None,
    reduction: Literal["fast", "exact"] = "fast",
    num_learners: int | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_interval: int | None = None,
    keep_checkpoints: int = 3,
    keep_best: int = 0,
    resume: bool = False,
    init_model_path: str | Path | None = None,
    callbacks: Iterable[Callable[[Event], Any]] = (),
    loggers: Any = (),
    log_interval: int = 10_000,
    eval_interval: int | None = None,
    num_eval_episodes: int = 32,
    eval_env: Any = None,
    target_return: float | None = None,
    time_budget: float | None = None,
    nonfinite: Literal["stop", "skip"] = "stop",
    progress: str = "auto",
    config: dict[str, Any] | None = None,
    on_begin: Callable[[], Any] = lambda: None,
    on_signal: Literal["exit", "return"] = "exit",
    own_process: bool = False,
) -> tuple[Any, History]:
    """Train an agent until `num_train_steps` environment steps.

    Args:
      agent: a DistributedAgent.
      num_train_steps: of the whole run; what was done before a resume counts. A step is a row of a
        rollout: where host environments reset on the next step, rows that only reset count too,
        and `valid_fraction` tells how many did not.
      seed: everything random follows from it.
      state: a TrainState to start from; it is copied, not destroyed. Host environments cannot be
        set back to it: they start new episodes, seeded from the actors' keys.
      mesh: from `jaxroll.parallel.make_mesh`; None: one device.
      reduction: "fast", or "exact": bitwise the same on any mesh.
      num_learners: must be the mesh's size, for every device learns; better left out.
      checkpoint_dir: the run's directory: checkpoints, metrics.jsonl, config. None: nothing is
        written.
      checkpoint_interval: environment steps between checkpoints; None: one every five minutes. One
        more is always at the end.
      keep_checkpoints: how many of the latest stay.
      keep_best: how many of the best by `eval_episode_return` stay beside them; each evaluation is
        then saved.
      resume: go on from the newest intact checkpoint in `checkpoint_dir`.
      init_model_path: take only the policy from this checkpoint: its params, and the moments
        that normalise its observations; not read where a checkpoint of the run itself is there to
        resume from.
      callbacks: called with an `Event` after each row; a true result stops the run, on any process
        all of them.
      loggers: names ("csv", "tensorboard") or functions of a row.
      log_interval: environment steps between rows (rounded up to whole iterations).
      eval_interval: environment steps between evaluations (rounded up alike); None: none. Each
        comes with a row, also where `log_interval` has none; a row tells of what came after the
        one before it.
      num_eval_episodes: whole episodes for each evaluation.
      eval_env: evaluate on this environment instead of the agent's; on the device or on the host.
      target_return: stop when an evaluation (without evaluations: a row) reaches this return.
      time_budget: stop after so many seconds.
      nonfinite: at a gradient that is not finite, "stop" with `NonFiniteError` or "skip" it; it is
        never applied.
      progress: "auto", "bar", "lines" or "silent".
      config: saved with each checkpoint, beside the agent's hyperparameters.
      on_begin: called on process 0 when the directory is this run's: locked and, where there is
        something to restore, restored. Again if the directory was deleted meanwhile.
      on_signal: after Ctrl-C, SIGTERM or SIGHUP the run is saved, and "exit" raises
        `KeyboardInterrupt` or `SystemExit`, so that a script ends; "return" returns as at any other
        stop. Ctrl-C in an interactive session returns.
      own_process: end the process itself at a second signal, when a first finds nothing to save, or
        when another process of the run is gone (exit code `parallel.PEER_LOST`).

    Returns:
      (state, history): `history.stopped_by` says why it ended ("steps", "target_return",
      "time_budget", "callback", "SIGINT", "SIGHUP", "SIGTERM"), `history.stopped_at` at which step
      and `history.saved_step` which is the newest on disk.
    """
    given = dict(locals())  # before there are other names
    options = check_options(agent, given)
    loggers = options.loggers
    eval_env = as_eval_env(agent, eval_env, "eval_env")
    if mesh is not None:
        parallel.check_mesh(mesh, agent.num_actors, num_learners)
    elif num_learners not in (None, 1):
        raise ValueError(
            f"num_learners is the number of devices that learn, 1 without a mesh; got "
            f"{num_learners}. Give mesh=jaxroll.parallel.make_mesh({num_learners})."
        )
    callbacks = as_callbacks(callbacks)
    check_loggers(loggers, checkpoint_dir)
    check_traces(agent)
    is_primary = jax.process_index() == 0
    run = Schedule(agent, log_interval, eval_interval, checkpoint_interval)
    shown = Progress(
        num_train_steps,
        description=f"{agent.name} {agent.env_name}",
        mode=progress,  # pyright: ignore[reportArgumentType]
        enabled=is_primary,
    )
    policy: dict[str, Any] = {}
    if init_model_path is not None and not (resume and has_steps(_steps_in(checkpoint_dir))):
        policy = policy_of(agent, init_model_path)
    history = History()
    members = getattr(agent, "members", None)  # several runs in one program have columns here
    with contextlib.ExitStack() as stack:
        checkpointer = lock = None
        if checkpoint_dir is not None:
            checkpoint_dir = Path(checkpoint_dir)
            checkpointer = Checkpointer(
                _steps_in(checkpoint_dir),
                keep_latest=keep_checkpoints,
                keep_best=keep_best,
                best_key=BEST_KEY,
            )
            lock = _claim(stack, checkpoint_dir, checkpointer, resume)
            stack.callback(checkpointer.wait)
        restores = resume and checkpointer is not None and has_steps(checkpointer.directory)
        if is_primary and not restores:
            on_begin()
        program = make_program(agent, mesh, reduction)
        stack.callback(program.close)
        stack.enter_context(shown)
        last_words = functools.partial(_last_words, shown, checkpointer, checkpoint_dir)
        interrupts = stack.enter_context(signals_of(last_words, own_process))
        interrupts.can_leave = lambda: program.is_collecting
        # Entered last: the rest of the stack would wait for a peer that is gone.
        stack.enter_context(parallel.peer_guard(own_process=interrupts.own_process))
        shown.status("compiling")
        began = time.monotonic()
        source = checkpointer if restores else None
        metadata = {**describe(agent), "seed": seed, **(config or {})}
        begun = _begin(program, source, state, policy, metadata)
        carry, iteration, elapsed, cut_episodes = begun
        run.begin(iteration, _steps_taken(run, carry["state"], iteration))
        if cut_episodes:
            shown.message(f"{cut_episodes} running episodes of host environments were truncated")
        if is_primary and restores:
            on_begin()
        logger = None
        if is_primary:
            # A row that a longer run would not have is written again when it is whole.
            whole = run.is_log(iteration) or iteration >= run.iterations(num_train_steps)
            kept = run.steps(iteration) if whole else run.steps(iteration) - 1
            kept = kept if resume and iteration else -1
            logger = make_loggers(loggers, checkpoint_dir, resume_from_step=kept)
            stack.callback(logger.close)
        if resume and checkpoint_dir is not None and is_primary:
            for row in History.read(checkpoint_dir / "metrics.jsonl"):
                history.append(row)

        def save(iteration: int, row: dict[str, Any]) -> None:
            if checkpointer is None:
                return
            if lock is not None and lock.renew():
                on_begin()  # the directory was deleted: the config comes back
            if logger is not None:
                logger.sync()  # no checkpoint counts a row that a power cut may take
            checkpointer.save(
                run.steps(iteration),
                carry,
                config={
                    **metadata,
                    "elapsed": elapsed + time.monotonic() - began,
                    "cut_episodes": cut_episodes,  # in no whole row yet
                },
                metrics={BEST_KEY: np.mean(row[BEST_KEY])} if BEST_KEY in row else {},
            )

        total = run.iterations(num_train_steps)
        pace, warned = 1, False
        saved, saved_time = iteration if resume else -1, began
        if iteration < total:
            carry = program.advance(carry, 0)  # compiles, so that no row's fps counts it
            carry, _ = read_metrics(carry, reset=False)
            if not interrupts.own_process:
                interrupts.check()  # of a signal whose exception a garbage collection swallowed
        last_row_time, last_row_step = time.monotonic(), run.steps(iteration)
        stopped_by = "steps"
        shown.begin(run.steps(iteration), resumed=restores or state is not None)
        while iteration < total:
            count = min(run.until_next(iteration), total - iteration, pace)
            dispatched = time.monotonic()
            try:
                carry = program.advance(carry, count)
            except (KeyboardInterrupt, SystemExit):
                if interrupts.received is None or program.left is None:
                    raise
                carry, count = program.left  # an environment hangs: what was before it is saved
            iteration += count
            interrupts.nothing_to_save = False
            now = time.monotonic()
            pace = next_pace(pace, count, now - dispatched, fixed=jax.process_count() > 1, run=run)
            step = run.steps(iteration)
            row, stop, at_end = {}, None, iteration == total
            carry, numbers = read_metrics(carry, reset=run.is_log(iteration))
            _check_finite(carry, numbers, step, nonfinite, checkpointer)
            if run.is_log(iteration) or at_end:
                row = _row(numbers, step, elapsed + now - began)
                warned = warned or _warn_lost_bootstraps(row)
                row["fps"] = (step - last_row_step) / max(now - last_row_time, 1e-9)
                if cut_episodes:
                    row["cut_episodes"] = cut_episodes
                if run.is_log(iteration):
                    cut_episodes = 0
                else:
                    row["partial"] = True  # a longer run will have a whole row here instead
                if eval_interval is not None and (run.is_eval(iteration) or at_end):
                    shown.update(step)
                    shown.status("evaluating")
                    episodes, spread = num_eval_episodes, reduction == "fast"
                    row |= evaluation_columns(
                        agent, carry["state"], seed, iteration, episodes, eval_env, spread
                    )
                last_row_time, last_row_step = time.monotonic(), step
                for tidy in _tidy_rows(row, members):
                    history.append(tidy)
                    if logger is not None:
                        logger(tidy)
                reached = row.get(BEST_KEY if eval_interval else "episode_return")
                if target_return is not None and reached is not None:
                    stop = "target_return" if np.mean(reached) >= target_return else None
                event = Event(step=step, row=row, state=carry["state"], agent=agent)
                if sum(bool(callback(event)) for callback in callbacks):
                    stop = stop or "callback"
                shown.update(step, episode_return=row.get("episode_return"))
            else:
                shown.update(step)
            if time_budget is not None and elapsed + time.monotonic() - began >= time_budget:
                stop = stop or "time_budget"
            is_due = checkpoint_interval is None and checkpoint_dir is not None
            is_due = is_due and time.monotonic() - saved_time >= SECONDS_BETWEEN_SAVES
            stop, is_due = _agreed(interrupts.name or stop, is_due)
            is_due = is_due or run.is_save(iteration) or (keep_best > 0 and BEST_KEY in row)
            if stop or at_end or is_due:
                save(iteration, row)
                saved, saved_time = iteration, time.monotonic()
            if stop:
                stopped_by = stop
                break
        if saved != iteration:
            save(iteration, {})
        history.stopped_by, history.stopped_at = stopped_by, run.steps(iteration)
        if checkpointer is not None:
            checkpointer.wait()
            history.saved_step = checkpointer.latest_step()
    is_ours = interrupts.own_process or (interrupts.name == "SIGINT" and hasattr(sys, "ps1"))
    if on_signal == "exit" and not is_ours:
        interrupts.check()
    return carry["state"], history


def _steps_taken(run: Schedule, state: Any, iteration: int) -> int:
    """Environment steps of a state; its own count, where the agent keeps it."""
    taken = int(np.asarray(count_value(state.learner.num_env_steps)).flat[0])
    return taken if taken or not iteration else run.steps(iteration)


def _agreed(stop: str | None, is_due: bool) -> tuple[str | None, bool]:
    """Why any process wants to stop, and whether for any a save is due.

    Clocks and callbacks differ between processes; what they do at a step must not.
    """
    number = parallel.process_max(2 * STOPS.index(stop) + is_due)
    return STOPS[number // 2], bool(number % 2)


def _last_words(
    shown: Progress, checkpointer: Checkpointer | None, directory: Any, name: str
) -> None:
    """Before a hard end: the bar's line put right, and what is on disk."""
    shown.close(failed=True)
    if jax.process_index():
        return
    saved = None if checkpointer is None else checkpointer.latest_step()
    text = f"step {saved:,} is on disk. Go on with: jaxroll resume {directory}" if saved else ""
    text = text or "nothing is on disk to go on with."
    print(f"jaxroll: ended by {name} without a save; {text}", file=sys.stderr)


def _claim(
    stack: contextlib.ExitStack, directory: Path, checkpointer: Checkpointer, resume: bool
) -> RunLock | None:
    """Make a directory this run's, for as long as the stack; raise where it cannot be that."""
    if resume:
        check_resumable(directory)
    lock = None
    if jax.process_index() == 0:
        lock = stack.enter_context(RunLock(directory))
        checkpointer.check_writable()
    if not resume:
        check_new(directory)
    return lock


def _begin(
    program: Any, source: Checkpointer | None, state: Any, policy: dict, now: dict[str, Any]
) -> tuple[Any, int, float, int]:
    """(carry, iteration, seconds before, episodes cut): new, from a state, or from a source."""
    if state is not None:
        state, cut = program.resume(program.place(jax.tree.map(jnp.copy, state)))
        return program.start(state), _iteration(state), 0.0, cut
    fresh = program.init(now["seed"])
    if policy and source is None:
        fresh = program.place(fresh.replace(learner=fresh.learner.replace(**policy)))
    carry = program.start(fresh)
    if source is None:
        return carry, _iteration(fresh), 0.0, 0
    _, carry, metadata = source.restore(carry, shardings=program.shardings(carry))
    before = metadata["config"]
    check_same_run(before, now)
    state, cut = program.resume(carry["state"])
    cut += int(before.get("cut_episodes", 0))
    return {**carry, "state": state}, _iteration(state), float(before.get("elapsed", 0.0)), cut


def _steps_in(directory: Any) -> Path:
    return Path(directory) / "checkpoints"


def _iteration(state: Any) -> int:
    """Iterations done; members of a sweep are always at the same one."""
    return int(np.asarray(state.learner.iteration).flat[0])


def _check_finite(
    carry: Any, numbers: Any, step: int, nonfinite: str, checkpointer: Checkpointer | None
) -> None:
    counts = numbers["metrics"]["nonfinite"].total
    counts = counts.reshape(-1, counts.shape[-1]).sum(0)  # over the members of a sweep
    if nonfinite == "stop" and counts.any():
        names = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree.leaves_with_path(carry["state"].learner.params)
        ]
        bad = [name for name, count in zip(names, counts) if count]
        shown = ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
        kept = "nothing was saved before it: set checkpoint_dir and checkpoint_interval"
        if checkpointer is not None:
            checkpointer.wait()
            if (last := checkpointer.latest_step()) is not None:
                kept = f"the last checkpoint, of step {last}, is finite"
        raise NonFiniteError(
            f"the gradient was not finite by step {step}, in {len(bad)} of {len(names)} leaves: "
            f"{shown}. It was not applied; {kept}. Lower the learning rate, look for NaN in "
            'observations and rewards, or use nonfinite="skip".'
        )


def _warn_lost_bootstraps(row: dict[str, Any]) -> bool:
    lost = int(np.sum(row.get("final_overflow", 0)))
    if lost:
        warnings.warn(
            f"{lost} truncated steps by step {row['step']} bootstrapped from V(obs) instead of "
            "V(final observation): more than max_truncations, or than the environment's time_limit "
            "allows. Leave out max_truncations, or correct time_limit. Further ones are counted as "
            "final_overflow.",
            stacklevel=3,
        )
    return lost > 0


def _row(read: dict[str, Any], step: int, seconds: float) -> dict[str, Any]:
    numbers = metrics_lib.compute(read["metrics"])
    counts = np.asarray(numbers.pop("nonfinite", 0))
    numbers["skipped_updates"] = counts.max(-1, initial=0).tolist()
    numbers.pop("episodes", None)
    return {
        "step": step,
        "episode": count_value(read["num_episodes"]),
        **numbers,
        "total_time": seconds,
    }


def _tidy_rows(row: dict[str, Any], members: Any) -> list[dict[str, Any]]:
    """The row, or one for each member of a sweep with the columns that tell them apart."""
    if members is None:
        return [row]
    return [
        # A swept learning rate is the member's column, not the metric of the same name.
        columns | {k: v[i] if np.ndim(v) else v for k, v in row.items() if k not in columns}
        for i, columns in enumerate(members)
    ]
