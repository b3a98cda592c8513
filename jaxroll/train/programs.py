"""The compiled side of the loop: several iterations for each dispatch, on a device, mesh or host.

A program advances a carry {"state", "metrics"} by a number of iterations that is data, not part of
the program: the last chunk of a run compiles nothing. Metrics add up in the carry from one dispatch
to the next, so that rows do not depend on how iterations were grouped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxroll import collectors, metrics as metrics_lib, parallel
from jaxroll.collectors.host import HostCollector
from jaxroll.envs import check_env
from jaxroll.spaces import zeros
from jaxroll.types import PyTree, TimeStep

Carry = dict[str, Any]  # {"state": TrainState, "metrics": dict of metrics}


@functools.partial(jax.jit, static_argnames=("mesh", "reduction"), donate_argnames=("carry",))
def _advance(agent: Any, carry: Carry, count: Any, *, mesh: Any, reduction: str) -> Carry:
    def chunk(agent: Any, carry: Carry, count: Any, *, axis_name: Any) -> Carry:
        def iteration(_: Any, carry: Carry) -> Carry:
            state, metrics = agent.train_step(
                carry["state"], axis_name=axis_name, reduction=reduction
            )
            return {"state": state, "metrics": metrics_lib.merge(carry["metrics"], metrics)}

        return jax.lax.fori_loop(0, count, iteration, carry)

    everywhere = PartitionSpec()
    specs = carry_specs(agent)
    run = parallel.on_mesh(chunk, mesh, (everywhere, specs, everywhere), specs)
    return run(agent, carry, count)


@functools.partial(jax.jit, donate_argnames=("carry",))
def _host_update(agent: Any, carry: Carry, rollouts: Any) -> Carry:
    state, metrics = agent.update(carry["state"], rollouts)
    return {"state": state, "metrics": metrics_lib.merge(carry["metrics"], metrics)}


@jax.jit
def _host_prefill(agent: Any, state: PyTree, rollouts: Any) -> PyTree:
    return agent.prefill(state, rollouts)


@jax.jit
def _init(agent: Any, key: jax.Array) -> PyTree:
    return agent.init(key)


@jax.jit
def _init_learner(agent: Any, key: jax.Array) -> PyTree:
    return agent.init_learner(key)


def read_metrics(carry: Carry, *, reset: bool) -> tuple[Carry, dict[str, Any]]:
    """The metrics of a carry on the host, by one dispatch and one transfer.

    Args:
      carry: its metrics are donated.
      reset: whether they start at zero again.

    Returns:
      (carry, {"metrics", "num_episodes"}): numpy arrays in the structure of the carry's.
    """
    read = {"metrics": carry["metrics"], "num_episodes": carry["state"].learner.num_episodes}
    metrics, packed = _read_metrics(carry["metrics"], read["num_episodes"], np.bool_(reset))
    return {**carry, "metrics": metrics}, metrics_lib.unpack(packed, read)


@functools.partial(jax.jit, donate_argnames=("metrics",))
def _read_metrics(metrics: Any, num_episodes: Any, reset: Any) -> tuple[Any, jax.Array]:
    packed = metrics_lib.pack({"metrics": metrics, "num_episodes": num_episodes})
    # A choice, not new zeros: the leaves stay on the devices where they are.
    return jax.tree.map(lambda x: jnp.where(reset, jnp.zeros_like(x), x), metrics), packed


def carry_specs(agent: Any) -> Any:
    """Where each part of a carry lives on a mesh: actors spread, the rest on every device."""
    return {"state": agent.state_specs(parallel.ACTORS), "metrics": PartitionSpec()}


def zero_metrics(agent: Any, state: Any, rollouts: Any = None) -> Any:
    """Metrics that hold nothing yet, of the structure that the agent's update gives.

    Args:
      agent: any agent.
      state: its state.
      rollouts: shapes of what actors collect, where that is not part of the program.
    """
    return metrics_lib.zeros_like(zero_shapes(agent, state, rollouts))


def zero_shapes(agent: Any, state: Any, rollouts: Any = None) -> Any:
    """The shapes of `zero_metrics`."""
    leaves, structure = jax.tree.flatten((agent, state, rollouts))
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return _metrics_shapes(structure, shapes)


def check_traces(agent: Any) -> None:
    """Trace a whole iteration: what goes wrong there does so before anything is written.

    Of host environments only the policy is traced. `zero_metrics` need not trace again.
    """
    if agent.is_host:
        host_rollout_shapes(agent, has_valid=False)
        return
    check_env(agent.env, num_steps=0)
    leaves, structure = jax.tree.flatten(agent)
    shapes = tuple(jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in leaves)
    state = _state_shapes(structure, shapes)
    _check_memory(agent, state)
    zero_shapes(agent, state)


@functools.lru_cache(maxsize=32)
def _state_shapes(structure: Any, leaves: tuple[Any, ...]) -> Any:
    agent = jax.tree.unflatten(structure, leaves)
    return jax.eval_shape(lambda a, key: a.init(key), agent, _key())


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


def _num_bytes(tree: PyTree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@functools.lru_cache(maxsize=32)
def _metrics_shapes(structure: Any, leaves: tuple[Any, ...]) -> Any:
    """Tracing a whole step takes about a second: once for each kind of agent is enough."""
    agent, state, rollouts = jax.tree.unflatten(structure, leaves)
    if rollouts is None:
        return jax.eval_shape(lambda a, s: a.train_step(s), agent, state)[1]
    return jax.eval_shape(lambda a, s, r: a.update(s, r), agent, state, rollouts)[1]


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """An environment of the right shapes that does nothing: what a host rollout will look like."""

    observation_space: Any
    action_space: Any

    def reset(self, key: jax.Array) -> tuple[Any, PyTree]:
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.asarray, zeros(self.observation_space))

    def step(self, key: jax.Array, state: Any, action: Any) -> tuple[Any, TimeStep]:
        _, obs = self.reset(key)
        false = jnp.zeros((), bool)
        return state, TimeStep(obs, jnp.zeros((), jnp.float32), false, false, obs)


def host_rollout_shapes(agent: Any, *, has_valid: bool) -> Any:
    """Shapes of one rollout of every actor, leaves [A, ...]."""
    env = _Shapes(agent.env.observation_space, agent.env.action_space)

    def collect(key: jax.Array, params: PyTree) -> Any:
        actor = collectors.init_actor(env, agent.policy, key, agent.envs_per_actor)
        _, rollout = collectors.collect(
            env, agent.policy, params, actor, agent.num_steps, **agent.collect_options
        )
        valid = rollout.transition.terminated if has_valid else None
        return rollout.replace(transition=rollout.transition.replace(valid=valid))

    params = jax.eval_shape(lambda k: agent.acting_params(agent.init_learner(k)), _key())
    one = jax.eval_shape(collect, _key(), params)
    count = agent.num_actors
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), one)


def _key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


class DeviceProgram:
    """Environments and learner in one compiled program, on one device or on a mesh."""

    def __init__(self, agent: Any, mesh: Mesh | None, reduction: str):
        self.agent, self.mesh, self.reduction = agent, mesh, reduction
        self._placed = _place_agent(agent, mesh)
        self.is_collecting, self.left = False, None  # a program on the device cannot be left

    def init(self, seed: int) -> PyTree:
        """The state of a new run; made whole in one place, so it never depends on the mesh."""
        return self.place(_init(self.agent, jax.random.key(seed)))

    def place(self, state: PyTree) -> PyTree:
        """A state that is whole here, put where the program expects it."""
        if self.mesh is None:
            return state
        return parallel.place(state, self.mesh, carry_specs(self.agent)["state"])

    def shardings(self, carry: Carry) -> Any:
        """Shardings of a carry for a restore; None: wherever the default is."""
        if self.mesh is None:
            return None
        return parallel.shardings(carry, self.mesh, carry_specs(self.agent))

    def start(self, state: PyTree) -> Carry:
        """A carry with metrics at zero."""
        metrics = zero_metrics(self.agent, state)
        if self.mesh is not None:
            metrics = parallel.place(metrics, self.mesh, PartitionSpec())
        return {"state": state, "metrics": metrics}

    def advance(self, carry: Carry, count: int) -> Carry:
        """`count` iterations; the old carry's memory is reused.

        On several CPU devices it waits: many dispatches under way at once would deadlock.
        """
        trips = np.int32(count)
        carry = _advance(self._placed, carry, trips, mesh=self.mesh, reduction=self.reduction)
        is_cpu_mesh = self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(carry) if is_cpu_mesh or not count else carry

    def resume(self, state: PyTree) -> tuple[PyTree, int]:
        """A restored state, bit by bit where it was, and how many episodes that cut: none."""
        return state, 0

    def close(self) -> None:
        """Nothing is held."""


class HostProgram:
    """Environments on the host, the learner on the device."""

    def __init__(self, agent: Any, mesh: Mesh | None, reduction: str):
        if mesh is not None and mesh.size > 1:
            raise ValueError(
                f"{agent.env} runs on the host, beside one device; got a mesh of {mesh.size}. "
                "Leave out mesh."
            )
        self.agent = agent
        self._placed = _place_agent(agent, None)
        self.is_collecting = False  # environments have the main thread now
        self.left: tuple[Carry, int] | None = None  # what an interrupted `advance` had done
        self.collectors = []
        try:
            for _ in range(agent.num_actors):
                host_env = agent.env.make(agent.envs_per_actor)
                self.collectors.append(
                    HostCollector(host_env, agent.policy, **agent.collect_options)
                )
        except BaseException:
            self.close()
            raise

    def init(self, seed: int) -> PyTree:
        """Params and freshly seeded environments."""
        params_key, actors_key = jax.random.split(jax.random.key(seed))
        keys = self.agent.actor_keys(actors_key)
        actors = [
            self.agent.prepare_actor(collector.init(keys[a]))
            for a, collector in enumerate(self.collectors)
        ]
        learner = _init_learner(self.agent, params_key)
        state = self.agent.assemble(learner, _stack(actors), self._rollout_shapes)
        for _ in range(self.agent.num_prefills):
            state, rollouts = self._collect(state)
            state = _host_prefill(self.agent, state, rollouts)
        return state

    def place(self, state: PyTree) -> PyTree:
        """The state unchanged: host programs use one device."""
        return state

    def shardings(self, carry: Carry) -> None:
        """Wherever the default is."""

    def start(self, state: PyTree) -> Carry:
        """A carry with metrics at zero."""
        metrics = zero_metrics(self.agent, state, self._rollout_shapes)
        return {"state": state, "metrics": metrics}

    @functools.cached_property
    def _rollout_shapes(self) -> Any:
        has_valid = self.collectors[0].envs.resets_on_next_step
        return host_rollout_shapes(self.agent, has_valid=has_valid)

    def _collect(self, state: PyTree) -> tuple[PyTree, Any]:
        params = self.agent.acting_params(state.learner)
        states, rollouts = [], []
        for a, collector in enumerate(self.collectors):
            actor = jax.tree.map(lambda x, a=a: x[a], state.actors)
            after, rollout = collector.collect(params, actor, self.agent.num_steps)
            states.append(after)
            rollouts.append(rollout)
        return state.replace(actors=_stack(states)), _stack(rollouts)

    def advance(self, carry: Carry, count: int) -> Carry:
        """`count` iterations: every actor's environments in turn, then one update.

        With a count of 0 everything is compiled, and no environment is touched.
        """
        if not count:
            self._rehearse(carry)
        for done in range(int(count)):
            self.is_collecting = True
            try:
                state, rollouts = self._collect(carry["state"])
            except (KeyboardInterrupt, SystemExit):
                self.left = carry, done
                raise
            finally:
                self.is_collecting = False
            carry = _host_update(self._placed, {**carry, "state": state}, rollouts)
        return carry

    def _rehearse(self, carry: Carry) -> None:
        collector, state = self.collectors[0], carry["state"]
        actor = jax.tree.map(lambda x: x[0], state.actors)
        params = self.agent.acting_params(state.learner)
        rollout = collector.rehearse(params, actor, self.agent.num_steps)
        rollouts = _stack([rollout] * len(self.collectors))
        jax.block_until_ready(_host_update(self._placed, jax.tree.map(jnp.copy, carry), rollouts))

    def resume(self, state: PyTree) -> tuple[PyTree, int]:
        """The state with its environments started anew, and how many running episodes that cut.

        Host environments cannot be restored: they are seeded from the actor's key. What a rollout
        before them ended in was bootstrapped, so their episodes are truncated, not terminated.
        """
        cut = np.count_nonzero(state.actors.statistics.episode_length)
        states = [
            self.agent.prepare_actor(
                collector.restart(jax.tree.map(lambda x, a=a: x[a], state.actors))
            )
            for a, collector in enumerate(self.collectors)
        ]
        return state.replace(actors=_stack(states)), int(cut)

    def close(self) -> None:
        """Close every environment."""
        for collector in self.collectors:
            collector.envs.close()


def make_program(agent: Any, mesh: Mesh | None, reduction: str) -> DeviceProgram | HostProgram:
    """The program that fits the agent's environment."""
    return (HostProgram if agent.is_host else DeviceProgram)(agent, mesh, reduction)


def _place_agent(agent: Any, mesh: Mesh | None) -> Any:
    """The agent with its leaves on the devices, so that no dispatch sends them again."""
    if mesh is None:
        return jax.device_put(agent)
    return parallel.place(agent, mesh, PartitionSpec())


def _stack(trees: list[PyTree]) -> PyTree:
    if len(trees) == 1:
        return jax.tree.map(lambda x: jnp.asarray(x)[None], trees[0])
    return jax.tree.map(lambda *xs: jnp.stack([jnp.asarray(x) for x in xs]), *trees)
