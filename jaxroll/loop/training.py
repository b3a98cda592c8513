"""Training: dispatch, evaluation, checkpoints, logs, signals. Knows the agents' protocol only."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxroll import collectors, parallel
from jaxroll.checkpoints import (
    Checkpointer,
    CheckpointWarning,
    RunLock,
    load_pytree,
    save_pytree,
)
from jaxroll.envs.base import HostEnv, HostEnvSpec
from jaxroll.learners import check_reduction
from jaxroll.loop.options import (
    as_callbacks,
    as_loggers,
    check_eval_env,
    check_options,
    check_resumable,
    has_steps,
)
from jaxroll.loop.programs import make_program
from jaxroll.loop.signals import Interrupts
from jaxroll.reporting import History, Progress, make_loggers, metrics as metrics_lib

# Folded into the run's key for evaluations: far from the numbers that `split` uses.
EVAL_FOLD = 2**30 + 1
SECONDS_PER_DISPATCH = 0.5  # how long a signal may have to wait


class NonFiniteError(FloatingPointError):
    """A gradient was not finite; the params are those from before it."""


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
      checkpoint_interval: environment steps between checkpoints; None: only at the end.
      keep_checkpoints: how many of the latest stay.
      resume: go on from the newest intact checkpoint in `checkpoint_dir`.
      init_model_path: take only the policy from this checkpoint: its params, and the moments
        that normalise its observations.
      callbacks: called with an `Event` after each row; a true result stops the run.
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
      own_process: end the process itself at a second signal, when a first finds nothing to save, or
        when another process of the run is gone (exit code `parallel.PEER_LOST`).

    Returns:
      (state, history): `history.stopped_by` says why it ended ("steps", "target_return",
      "time_budget", "callback", "SIGINT", "SIGTERM").
    """
    given = dict(locals())  # before there are other names
    check_reduction(reduction)
    check_options(agent, given)
    if mesh is not None:
        parallel.check_mesh(mesh, agent.num_actors, num_learners)
    elif num_learners not in (None, 1):
        raise ValueError(
            f"num_learners is the number of devices that learn, 1 without a mesh; got "
            f"{num_learners}. Give mesh=jaxroll.parallel.make_mesh({num_learners})."
        )
    callbacks = as_callbacks(callbacks)
    loggers = as_loggers(loggers, checkpoint_dir)
    is_primary = jax.process_index() == 0
    run = _Run(agent, seed, mesh, reduction, log_interval, eval_interval, checkpoint_interval)
    shown = Progress(
        num_train_steps,
        description=f"{agent.name} {agent.env_name}",
        mode=progress,  # pyright: ignore[reportArgumentType]
        enabled=is_primary,
    )
    policy = {} if init_model_path is None else _policy_of(agent, init_model_path)
    history = History()
    members = getattr(agent, "members", None)  # several runs in one program have columns here
    with contextlib.ExitStack() as stack:
        checkpointer = None
        if checkpoint_dir is not None:
            checkpoint_dir = Path(checkpoint_dir)
            if resume:
                check_resumable(checkpoint_dir)
            if is_primary:
                stack.enter_context(RunLock(checkpoint_dir))
            steps = checkpoint_dir / "checkpoints"
            checkpointer = Checkpointer(steps, keep_latest=keep_checkpoints, keep_best=0)
            if not resume and checkpointer.steps():
                raise FileExistsError(
                    f"{checkpoint_dir} holds a run already, at step {checkpointer.latest_step()}. "
                    "Use resume=True to go on with it, or another checkpoint_dir."
                )
            stack.callback(checkpointer.wait)
        program = make_program(agent, mesh, reduction)
        stack.callback(program.close)
        stack.enter_context(shown)
        interrupts = stack.enter_context(Interrupts(own_process=own_process))
        # Entered last: the rest of the stack would wait for a peer that is gone.
        stack.enter_context(parallel.peer_guard(own_process=own_process))
        shown.status("compiling")
        began = time.monotonic()
        carry, iteration, elapsed = _begin(run, program, checkpointer, state, resume, policy)
        logger = None
        if is_primary:
            # A row that a longer run would not have is written again when it is whole.
            whole = run.is_log(iteration) or iteration >= run.iterations(num_train_steps)
            kept = run.steps(iteration) if whole else run.steps(iteration) - 1
            kept = kept if resume and iteration else -1
            logger = make_loggers(loggers, checkpoint_dir, resume_from_step=kept)
            stack.callback(_unless_full, logger.close)
        if resume and checkpoint_dir is not None and is_primary:
            for row in History.read(checkpoint_dir / "metrics.jsonl"):
                history.append(row)
        metadata = {**describe(agent), "seed": seed, **(config or {})}

        def save(iteration: int) -> None:
            if checkpointer is not None:
                clock = elapsed + time.monotonic() - began
                checkpointer.save(
                    run.steps(iteration), carry, config={**metadata, "elapsed": clock}
                )

        total = run.iterations(num_train_steps)
        pace = 1
        saved = iteration if resume else -1
        if iteration < total:
            carry = program.advance(carry, 0)  # compiles, so that no row's fps counts it
        last_row_time, last_row_step = time.monotonic(), run.steps(iteration)
        stopped_by = "steps"
        shown.start = shown.step = run.steps(iteration)
        while iteration < total:
            count = min(run.until_next(iteration), total - iteration, pace)
            dispatched = time.monotonic()
            carry = program.advance(carry, count)
            iteration += count
            interrupts.nothing_to_save = False
            now = time.monotonic()
            pace = _next_pace(pace, count, now - dispatched, fixed=jax.process_count() > 1, run=run)
            step = run.steps(iteration)
            stop = None
            at_end = iteration == total
            _check_finite(carry, step, nonfinite, checkpointer)
            if run.is_log(iteration) or at_end:
                row = _row(carry, agent, step, elapsed + now - began)
                row["fps"] = (step - last_row_step) / max(now - last_row_time, 1e-9)
                if not run.is_log(iteration):
                    row["partial"] = True  # a longer run will have a whole row here instead
                if eval_interval is not None and (run.is_eval(iteration) or at_end):
                    shown.status("evaluating")
                    row |= _evaluation(
                        agent, carry["state"], seed, iteration, num_eval_episodes, eval_env
                    )
                last_row_time, last_row_step = time.monotonic(), step
                if run.is_log(iteration):
                    carry = {**carry, "metrics": program.start(carry["state"])["metrics"]}
                for tidy in _tidy_rows(row, members):
                    history.append(tidy)
                    if logger is not None:
                        for one in logger.loggers:
                            _unless_full(one, tidy)
                reached = row.get("eval_episode_return" if eval_interval else "episode_return")
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
            if parallel.any_process(interrupts.received is not None):
                stop = interrupts.name or "SIGTERM"
            if stop or at_end or run.is_save(iteration):
                save(iteration)
                saved = iteration
            if stop:
                stopped_by = stop
                break
        if saved != iteration:
            save(iteration)
        if checkpointer is not None:
            checkpointer.wait()
    history.stopped_by = stopped_by
    return carry["state"], history


class _Run:
    """When things happen: everything is counted in iterations from the start of the run."""

    def __init__(
        self,
        agent: Any,
        seed: int,
        mesh: Mesh | None,
        reduction: str,
        log_interval: int,
        eval_interval: int | None,
        checkpoint_interval: int | None,
    ):
        self.agent, self.seed, self.mesh, self.reduction = agent, seed, mesh, reduction
        self.log_every = self._iterations("log_interval", log_interval)
        self.save_every = self._iterations("checkpoint_interval", checkpoint_interval)
        self.eval_every = self._iterations("eval_interval", eval_interval)

    def _iterations(self, name: str, steps: int | None) -> Any:
        if steps is None:
            return None
        if steps < 1:
            raise ValueError(f"{name} must be at least 1 environment step, got {steps}.")
        return max(1, -(-int(steps) // self.agent.steps_per_iteration))

    def steps(self, iteration: int) -> int:
        """Environment steps after so many iterations."""
        return self.agent.prefilled_steps + iteration * self.agent.steps_per_iteration

    def iterations(self, steps: int) -> int:
        """Iterations that reach at least so many environment steps."""
        left = steps - self.agent.prefilled_steps
        return max(0, math.ceil(left / self.agent.steps_per_iteration))

    def is_log(self, iteration: int) -> bool:
        return iteration % self.log_every == 0 or self.is_eval(iteration)

    def is_eval(self, iteration: int) -> bool:
        return bool(self.eval_every) and iteration % self.eval_every == 0

    def is_save(self, iteration: int) -> bool:
        return bool(self.save_every) and iteration % self.save_every == 0

    def until_next(self, iteration: int) -> int:
        """Iterations until something has to happen."""
        every = (self.log_every, self.eval_every, self.save_every)
        return min(n - iteration % n for n in every if n)


def _unless_full(action: Callable[..., Any], *args: Any) -> None:
    """A row that a full disk does not take is no reason to end a run."""
    try:
        action(*args)
    except OSError as error:
        warnings.warn(
            f"a row of metrics could not be written: {error}. The program goes on; what a file "
            "still holds back is written with the next row.",
            CheckpointWarning,
            stacklevel=3,
        )


def _begin(
    run: _Run,
    program: Any,
    checkpointer: Checkpointer | None,
    state: Any,
    resume: bool,
    policy: dict[str, Any],
) -> tuple[Any, int, float]:
    """(carry, iteration, seconds before): new, from a given state, or restored."""
    if state is not None:
        state = program.resume(program.place(jax.tree.map(jnp.copy, state)))
        return program.start(state), _iteration(state), 0.0
    fresh = program.init(run.seed)
    if policy:
        fresh = program.place(fresh.replace(shared=fresh.shared.replace(**policy)))
    carry = program.start(fresh)
    if not resume or checkpointer is None or not has_steps(checkpointer):
        return carry, _iteration(fresh), 0.0
    _, carry, metadata = checkpointer.restore(carry, shardings=program.shardings(carry))
    carry = {**carry, "state": program.resume(carry["state"])}
    iteration = _iteration(carry["state"])
    return carry, iteration, float(metadata["config"].get("elapsed", 0.0))


def _policy_of(agent: Any, path: str | Path) -> dict[str, Any]:
    """`params` and `moments` in a run or a saved state; read before anything is compiled."""
    if not Path(path).exists():
        raise FileNotFoundError(
            f"init_model_path = {path} does not exist. Give a run's directory, or what save wrote."
        )
    key = jax.eval_shape(lambda: jax.random.key(0))
    init = agent.init_shared if agent.is_host else lambda key: agent.init(key).shared
    like = jax.eval_shape(init, key)
    source = _checkpoints_in(path)
    params, saved = load_pytree(source, like.params, subtree="state/shared/params")
    normalizes = like.moments is not None
    was = saved.get("hyperparameters", {}).get("normalize_observations", normalizes)
    if was != normalizes:
        raise ValueError(
            f"the policy of init_model_path = {path} was trained with normalize_observations="
            f"{was}, so it would see other observations with {normalizes}. Create the agent with "
            f"normalize_observations={was}."
        )
    if not normalizes:
        return {"params": params}
    moments, _ = load_pytree(source, like.moments, subtree="state/shared/moments")
    return {"params": params, "moments": moments}


def _iteration(state: Any) -> int:
    """Iterations done; members of a sweep are always at the same one."""
    return int(np.asarray(state.shared.iteration).flat[0])


def _next_pace(pace: int, count: int, seconds: float, *, fixed: bool, run: _Run) -> int:
    """How many iterations the next dispatch may have, for one to take about half a second."""
    if fixed:  # processes must agree, and their clocks do not
        return max(1, min(run.log_every, 16))
    if count < pace:
        return pace
    wanted = int(count * SECONDS_PER_DISPATCH / max(seconds, 1e-4))
    return max(1, min(wanted, 4 * pace))


def _check_finite(carry: Any, step: int, nonfinite: str, checkpointer: Checkpointer | None) -> None:
    counts = np.asarray(jax.device_get(carry["metrics"]["nonfinite"].total))
    counts = counts.reshape(-1, counts.shape[-1]).sum(0)  # over the members of a sweep
    if nonfinite == "stop" and counts.any():
        names = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree.leaves_with_path(carry["state"].shared.params)
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


def _row(carry: Any, agent: Any, step: int, seconds: float) -> dict[str, Any]:
    numbers = metrics_lib.compute(carry["metrics"])
    counts = np.asarray(numbers.pop("nonfinite", 0))
    numbers["skipped_updates"] = counts.max(-1, initial=0).tolist()
    numbers.pop("episodes", None)
    return {
        "step": step,
        "episode": np.asarray(carry["state"].shared.num_episodes).tolist(),
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


def _evaluation(
    agent: Any, state: Any, seed: int, iteration: int, num_episodes: int, env: Any
) -> dict[str, Any]:
    def key(seed: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), EVAL_FOLD), iteration)

    members = getattr(agent, "seeds", None)
    keys = key(seed) if members is None else jax.vmap(key)(members)
    result = evaluate_with_key(agent, state, keys, num_episodes, True, env)
    names = ("episode_return", "episode_length", "num_unfinished")
    return {f"eval_{name}": result[name] for name in names}


def evaluate(
    agent: Any,
    state: Any,
    num_episodes: int,
    *,
    seed: int = 0,
    deterministic: bool = True,
    env: Any = None,
) -> dict[str, Any]:
    """Play whole episodes; see `DistributedAgent.eval`."""
    check_eval_env(agent, env, "env")
    key = jax.random.fold_in(jax.random.key(seed), EVAL_FOLD)
    members = getattr(agent, "members", None)
    if members is not None:
        key = jnp.broadcast_to(key, (len(members),))
    return evaluate_with_key(agent, state, key, num_episodes, deterministic, env)


def evaluate_with_key(
    agent: Any, state: Any, key: jax.Array, num_episodes: int, deterministic: bool, env: Any
) -> dict[str, Any]:
    """Means and each of the returns and lengths of `num_episodes` whole episodes.

    With a key for each member of a sweep, [N], so are the results. The return of an episode that
    did not end is NaN, and the means are without it.
    """
    env = agent.env if env is None else env
    params = parallel.local(agent.acting_params(state.shared))
    options = {"num_episodes": num_episodes, "deterministic": deterministic}
    if isinstance(env, HostEnv | HostEnvSpec):
        result = _evaluate_on_host(env, agent.policy, params, key, **options)
    else:
        play = _evaluate_members if key.ndim else _evaluate
        result = play(env, agent.policy, params, key, **options)
    is_complete = np.asarray(result.is_complete)
    returns = np.where(is_complete, np.asarray(result.episode_return), np.float32(np.nan))
    lengths = np.asarray(result.episode_length)
    if not is_complete.all():
        warnings.warn(
            f"{is_complete.size - is_complete.sum()} of {is_complete.size} episodes did not end, "
            "or never began behind one that did not; the means are without them. Give the "
            "environment a time limit.",
            stacklevel=3,
        )
    return {
        **episode_means(returns, lengths, is_complete),
        "episode_returns": returns,
        "episode_lengths": lengths,
        "is_complete": is_complete,
        "num_episodes": int(num_episodes),
    }


def episode_means(returns: Any, lengths: Any, is_complete: Any) -> dict[str, Any]:
    """Over the complete episodes of the last axis; NaN where there is none."""
    count = is_complete.sum(-1, keepdims=True)

    def mean(x: Any) -> Any:
        total = np.sum(x, -1, keepdims=True, where=is_complete)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    center = mean(returns)
    return {
        "episode_return": center[..., 0].tolist(),
        "episode_return_std": np.sqrt(mean(np.square(returns - center)))[..., 0].tolist(),
        "episode_length": mean(lengths)[..., 0].tolist(),
        "num_unfinished": (~is_complete).sum(-1).tolist(),
    }


_evaluate = functools.partial(
    jax.jit, static_argnums=(0, 1), static_argnames=("num_episodes", "deterministic")
)(collectors.evaluate)


@functools.partial(
    jax.jit, static_argnums=(0, 1), static_argnames=("num_episodes", "deterministic")
)
def _evaluate_members(env: Any, policy: Any, params: Any, keys: Any, **options: Any) -> Any:
    return jax.vmap(lambda p, k: collectors.evaluate(env, policy, p, k, **options))(params, keys)


def _evaluate_on_host(env: Any, policy: Any, params: Any, key: Any, **options: Any) -> Any:
    """As `_evaluate`, or as `_evaluate_members` one member after the other."""
    if not key.ndim:
        return collectors.evaluate_host(env, policy, params, key, **options)
    members = [jax.tree.map(lambda x, i=i: x[i], (params, key)) for i in range(len(key))]
    results = [collectors.evaluate_host(env, policy, *member, **options) for member in members]
    return jax.tree.map(lambda *x: np.stack(x), *results)


def describe(agent: Any) -> dict[str, Any]:
    """The agent's name, environment and hyperparameters, as JSON can hold them."""
    values = {}
    for name in agent.hyperparameters():
        value = getattr(agent, name)
        if hasattr(value, "tolist"):
            value = np.asarray(value).tolist()
        if isinstance(value, float) and math.isinf(value):
            value = None
        values[name] = list(value) if isinstance(value, tuple) else value
    return {"agent": agent.name, "env": agent.env_name, "hyperparameters": values}


def save(agent: Any, state: Any, path: str | Path, *, overwrite: bool = False) -> None:
    """Write a state to a directory of its own, verified when it is loaded."""
    save_pytree(path, {"state": state}, describe(agent), overwrite=overwrite)


def load(agent: Any, path: str | Path) -> Any:
    """The state that `save`, or a run, wrote; another architecture is an error that says where."""
    like = jax.eval_shape(agent.init, jax.random.key(0)) if not agent.is_host else None
    if like is None:
        program = make_program(agent, None, "fast")
        try:
            like = program.init(0)
        finally:
            program.close()
    return load_pytree(_checkpoints_in(path), like, subtree="state")[0]


def _checkpoints_in(path: str | Path) -> Path:
    """A run directory's checkpoints, or the path itself."""
    steps = Path(path) / "checkpoints"
    return steps if steps.is_dir() else Path(path)
