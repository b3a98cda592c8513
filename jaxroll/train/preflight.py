"""Checks of a run before anything is compiled or written."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxroll import parallel
from jaxroll.agents.states import check_state, key_shape
from jaxroll.checks import check_choice, check_count, check_flag, check_path
from jaxroll.envs import as_env, check_env
from jaxroll.spaces import shows_alike
from jaxroll.train.checkpoint import Checkpointer, CheckpointWarning, NoCheckpointError
from jaxroll.train.logging import make_loggers
from jaxroll.train.options import Options
from jaxroll.train.programs import shapes
from jaxroll.train.step_files import as_json

_RUN_FILES = (".lock", "checkpoints", "config.toml", "metrics.jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The arguments of `train` that are objects, checked; its values are `Options`."""

    state: Any = None
    mesh: Mesh | None = None
    checkpoint_dir: Path | None = None
    resume: bool = False
    eval_env: Any = None
    callbacks: tuple[Callable[..., Any], ...] = ()
    config: Mapping[str, Any] | None = None
    on_begin: Callable[[], Any] = lambda: None
    on_signal: str = "exit"
    own_process: bool = False


def check_start(
    agent: Any, options: Options, *, num_learners: int | None = None, **given: Any
) -> Start:
    """The arguments as they are used; raise for what cannot be trained, before it compiles."""
    start = Start(**given)
    directory = start.checkpoint_dir
    directory = None if directory is None else check_path("checkpoint_dir", directory)
    check_budget(agent, options.num_train_steps)
    check_flag("resume", start.resume)
    check_choice("on_signal", start.on_signal, ("exit", "return"))
    check_flag("own_process", start.own_process)
    _check_mesh(agent, start.mesh, num_learners)
    if start.resume and directory is None:
        raise ValueError("resume=True needs the checkpoint_dir of the run to go on with.")
    if start.state is not None:
        if start.resume:
            raise ValueError("give either resume=True or state, not both.")
        if options.init_model_path is not None:
            raise ValueError(
                "give either state, which holds a policy, or init_model_path, not both. To put "
                "another policy into a state: "
                "state.replace(learner=state.learner.replace(params=…))."
            )
        check_state(start.state)
        _check_fits(agent, start.state)
    if not callable(start.on_begin):
        raise TypeError(f"on_begin must be a function, got {start.on_begin!r}.")
    if start.config is not None:  # not hours later, by the first save
        as_json("config", start.config)
    # Their packages, and whether they need a directory. The run's own files open only where it
    # goes on; functions are not tried, for they may have a close.
    with tempfile.TemporaryDirectory() as scratch:
        names = [x for x in options.loggers if isinstance(x, str)]
        make_loggers(names, None if directory is None else scratch).close()
    callbacks = _as_callbacks(start.callbacks)
    eval_env = as_eval_env(agent, start.eval_env, "eval_env")
    check_traces(agent)
    return dataclasses.replace(
        start, checkpoint_dir=directory, callbacks=callbacks, eval_env=eval_env
    )


def _check_mesh(agent: Any, mesh: Any, num_learners: int | None) -> None:
    if not isinstance(mesh, Mesh | None):
        raise TypeError(
            f"mesh must be a mesh, got {mesh!r}. Use mesh=jaxroll.parallel.make_mesh(8)."
        )
    if num_learners is not None:
        check_count("num_learners", num_learners)
    if mesh is not None:
        parallel.check_mesh(mesh, agent.num_actors, num_learners)
    elif num_learners not in (None, 1):
        raise ValueError(
            f"num_learners is the number of devices that learn, 1 without a mesh; got "
            f"{num_learners}. Give mesh=jaxroll.parallel.make_mesh({num_learners})."
        )


def _check_fits(agent: Any, state: Any) -> None:
    """Raise if a state is not of an agent of these sizes, with the leaves that differ."""
    if agent.is_host:  # its actors are known when environments are open, but for their number
        sizes = jax.ShapeDtypeStruct((agent.num_actors, agent.envs_per_actor), bool)
        like: Any = jax.eval_shape(agent.init_learner, key_shape()), sizes
        state = state.learner, state.actors.is_first
    else:
        like = jax.eval_shape(agent.init, key_shape())
    wanted, got = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype}{list(x.shape)}"
            for path, x in jax.tree.leaves_with_path(tree)
        }
        for tree in (like, state)
    )
    different = [
        f"{name} is {got.get(name, 'missing')}, the agent's {wanted.get(name, 'missing')}"
        for name in wanted | got
        if got.get(name) != wanted.get(name)
    ]
    if different:
        raise ValueError(
            f"state must be of an agent of the same sizes, but {len(different)} leaves differ: "
            f"{'; '.join(different[:3])}. Create the agent with the sizes that the state was made "
            "with."
        )


def check_budget(agent: Any, num_train_steps: int) -> None:
    """Raise `ValueError` if a run would end before its first update."""
    if num_train_steps <= agent.prefilled_steps:
        raise ValueError(
            f"num_train_steps must be more than the {agent.prefilled_steps} steps with which the "
            f"rings are filled before the first update, got {num_train_steps}. Train longer, or "
            "use a smaller num_storages."
        )


def as_eval_env(agent: Any, env: Any, argument: str) -> Any:
    """An environment, or the one of this name; raise if the agent's policy cannot act in it.

    Args:
      agent: whose spaces it must have.
      env: whatever `jaxroll.envs.as_env` takes; None: the agent's own.
      argument: how to call it in an error.
    """
    if env is None:
        return None
    env = as_env(env, argument)
    for name, fits in (("observation_space", shows_alike), ("action_space", operator.eq)):
        wanted, got = getattr(agent.env, name), getattr(env, name)
        if not fits(wanted, got):
            raise ValueError(f"{argument} must have the agent's {name}, {wanted}; got {got}.")
    return env


def _as_callbacks(callbacks: Any) -> tuple[Callable[..., Any], ...]:
    if callable(callbacks) or not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be a list of functions, got {callbacks!r}.")
    functions = tuple(callbacks)  # an iterator is used up by looking at it once
    for function in functions:
        if not callable(function):
            raise TypeError(f"a callback is a function of an Event, got {function!r}.")
    return functions


def check_traces(agent: Any) -> None:
    """Trace a whole iteration of a JAX environment: what goes wrong there does so before a run."""
    if agent.is_host:
        return
    check_env(agent.env, num_steps=0)
    state = shapes("init", agent, jax.random.key(0))
    _check_memory(agent, state)
    shapes("train_step", agent, state)


def _check_memory(agent: Any, state: Any) -> None:
    """Raise if state and rollout are larger than the machine's memory, which ends in a kill."""
    if jax.default_backend() != "cpu":
        return
    actors = state.actors
    num_steps = agent.steps_per_iteration // math.prod(actors.is_first.shape[-2:])
    # A row has some eight numbers beside its observation.
    size = _num_bytes(state) + num_steps * _num_bytes((actors.obs, [actors.is_first] * 32))
    memory = available_memory()
    if size > memory:
        raise ValueError(
            f"state and rollout must fit into this machine's {memory / 2**30:.1f} GiB, but have at "
            f"least {size / 2**30:.1f} GiB. Use fewer environments (num_envs), shorter or fewer "
            "unrolls (num_steps, num_storages), or smaller layers."
        )


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of this machine, or of the container (cgroup v1 or v2) where that has fewer."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            memory = min(memory, int((cgroup / name).read_text()))
    return memory


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def check_resumable(directory: Path) -> None:
    """Raise if a directory holds things but no run; a new one may be gone on with from step 0.

    So a script that always says resume=True does the right thing from its first start on, and a
    run that was killed before its first checkpoint starts over; but a wrong path is not taken.
    """
    found = sorted(os.listdir(directory)) if directory.is_dir() else []
    if found and not set(_RUN_FILES) & set(found):
        shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise NoCheckpointError(
            f"{directory} holds no checkpoint to resume from, but {shown}. Give the directory of "
            "a run."
        )


def check_new(directory: Path, checkpointer: Checkpointer) -> None:
    """Raise `FileExistsError` if a directory holds what a new run would write over."""
    metrics = directory / "metrics.jsonl"
    if steps := checkpointer.steps():
        found, way = f"at step {steps[-1]}", "go on with it"
    elif checkpointer.numbers():
        found, way = "whose checkpoints are all damaged", "see what is damaged"
    elif metrics.exists() and metrics.stat().st_size:
        found, way = "that was stopped before its first checkpoint, with its metrics", "start over"
    else:
        return
    raise FileExistsError(
        f"{directory} holds a run already, {found}. Use resume=True to {way}, or another "
        "checkpoint_dir."
    )


def check_same_run(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare what a checkpoint says of its run with what goes on: its seed must be the same.

    Keys and environments are those of the checkpoint, so another seed would be without effect;
    another hyperparameter has one, and is warned of.
    """
    for name in ("seed", "agent", "env"):
        if name in before and before[name] != now[name]:
            raise ValueError(
                f"the run has {name} {before[name]}, and goes on with it; got {name} {now[name]}. "
                "Use another directory for another run."
            )
    changed = []
    for table, prefix in (("hyperparameters", ""), ("env_options", "env_options.")):
        old, new = before.get(table, {}), now.get(table, {})
        changed += [
            f"{prefix}{name} = {_shown(new.get(name))}, before {_shown(old.get(name))}"
            for name in sorted(old.keys() | new.keys())
            if (name in old or prefix) and old.get(name) != new.get(name)
        ]
    if changed:
        warnings.warn(
            f"the run goes on with {'; '.join(changed)}. It is no longer the run that its config "
            "describes from the start.",
            CheckpointWarning,
            stacklevel=4,
        )


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
