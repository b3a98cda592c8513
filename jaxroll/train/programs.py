"""The compiled side of the loop: several iterations for each dispatch, on a device, mesh or host.

A program advances a carry {"state", "metrics"} by a number of iterations that is data, not part of
the program: the last chunk of a run compiles nothing. Metrics add up in the carry from one dispatch
to the next, so that rows do not depend on how iterations were grouped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxroll import metrics as metrics_lib, parallel
from jaxroll.collectors.host import HostCollector
from jaxroll.types import ActorState, PyTree, Rollout

Carry = dict[str, Any]  # {"state": TrainState, "metrics": dict of metrics}


@functools.partial(jax.jit, static_argnums=0)
def call(method: str, agent: Any, *args: Any) -> Any:
    """A pure method of an agent, compiled once for all hyperparameters that are leaves."""
    return getattr(agent, method)(*args)


def shapes(method: str, agent: Any, *args: Any) -> Any:
    """The shapes that a method gives; a whole iteration takes a second to trace, but only once."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (agent, *args))
    return call.eval_shape(method, *like)


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


@functools.partial(jax.jit, static_argnames="reduction", donate_argnames="carry")
def _update(agent: Any, carry: Carry, rollouts: Rollout, *, reduction: str) -> Carry:
    state, metrics = agent.update(carry["state"], rollouts, reduction=reduction)
    return {"state": state, "metrics": metrics_lib.merge(carry["metrics"], metrics)}


def carry_specs(agent: Any) -> Any:
    """Where each part of a carry lives on a mesh: actors spread, the rest on every device."""
    return {"state": agent.state_specs(parallel.ACTORS), "metrics": PartitionSpec()}


@functools.partial(jax.jit, static_argnames="mesh")
def _init(agent: Any, key: jax.Array, *, mesh: Any) -> PyTree:
    def init(agent: Any, key: jax.Array, *, axis_name: Any) -> PyTree:
        return agent.init(key, axis_name=axis_name)

    everywhere = PartitionSpec()
    specs = agent.state_specs(parallel.ACTORS)
    return parallel.on_mesh(init, mesh, (everywhere, everywhere), specs)(agent, key)


def zero_metrics(agent: Any, state: Any, rollouts: Rollout | None = None) -> Any:
    """Metrics that hold nothing yet, of the structure that a step, or an update, gives."""
    if rollouts is None:
        return metrics_lib.zeros_like(shapes("train_step", agent, state)[1])
    return metrics_lib.zeros_like(shapes("update", agent, state, rollouts)[1])


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


class Program:
    """Environments and learner in one compiled program, on one device or on a mesh.

    Attributes:
      is_collecting: whether host environments have the main thread now, so that it may be left.
      left: the carry, and the iterations done, before what an interrupted `advance` had begun.
    """

    is_collecting = False
    left: tuple[Carry, int] | None = None

    def __init__(self, agent: Any, mesh: Mesh | None, reduction: str):
        self.agent, self.mesh, self.reduction = agent, mesh, reduction
        # On the devices, so that no dispatch sends hyperparameters again.
        self._placed = self._put(agent, PartitionSpec())

    def _put(self, tree: PyTree, specs: Any) -> PyTree:
        return jax.device_put(tree) if self.mesh is None else parallel.place(tree, self.mesh, specs)

    def init(self, seed: int) -> PyTree:
        """The state of a new run, each actor on its own device from the start."""
        key = self._put(jax.random.key(seed), PartitionSpec())
        return _init(self._placed, key, mesh=self.mesh)

    def place(self, state: PyTree) -> PyTree:
        """A state that is whole here, put where the program expects it."""
        return self._put(state, carry_specs(self.agent)["state"])

    def shardings(self, carry: Carry) -> Any:
        """Shardings of a carry for a restore; None: wherever the default is."""
        if self.mesh is None:
            return None
        return parallel.shardings(carry, self.mesh, carry_specs(self.agent))

    def start(self, state: PyTree) -> Carry:
        """A carry with metrics at zero."""
        metrics = zero_metrics(self.agent, state)
        return {"state": state, "metrics": self._put(metrics, PartitionSpec())}

    def resume(self, state: PyTree) -> tuple[PyTree, int]:
        """A restored state, bit by bit where it was, and how many episodes that cut: none."""
        return state, 0

    def advance(self, carry: Carry, count: int) -> Carry:
        """`count` iterations, of which 0 only compile; the old carry's memory is reused.

        On several CPU devices it waits: many dispatches under way at once would deadlock.
        """
        trips = np.int32(count)
        carry = _advance(self._placed, carry, trips, mesh=self.mesh, reduction=self.reduction)
        is_cpu_mesh = self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(carry) if is_cpu_mesh or not count else carry

    def close(self) -> None:
        """Let go of environments."""


class HostProgram(Program):
    """Environments on the host, the learner on the device: `collect`, then `update`."""

    def __init__(self, agent: Any, mesh: Mesh | None, reduction: str):
        if mesh is not None and mesh.size > 1:
            raise ValueError(
                f"{agent.env} runs on the host, beside one device; got a mesh of {mesh.size}. "
                "Leave out mesh."
            )
        super().__init__(agent, None, reduction)
        self.collectors: list[HostCollector] = []
        try:
            for _ in range(agent.num_actors):
                envs = agent.env.make(agent.envs_per_actor)
                self.collectors.append(HostCollector(envs, agent.policy, **agent.collect_options))
        except BaseException:
            self.close()
            raise

    def init(self, seed: int) -> PyTree:
        """Params and freshly seeded environments."""
        agent = self.agent
        params_key, actors_key = jax.random.split(jax.random.key(seed))
        keys, learner = agent.actor_keys(actors_key), call("init_learner", agent, params_key)
        actors = self._begin_actors(lambda collector, a: collector.init(keys[a]))
        state = agent.assemble(learner, actors, self._rehearse(learner, actors))
        for _ in range(agent.num_prefills):
            state = call("prefill", agent, *self.collect(state))
        return state

    def start(self, state: PyTree) -> Carry:
        """A carry with metrics at zero."""
        rollouts = self._rehearse(state.learner, state.actors)
        return {"state": state, "metrics": zero_metrics(self.agent, state, rollouts)}

    def resume(self, state: PyTree) -> tuple[PyTree, int]:
        """The state with its environments started anew, and how many running episodes that cut.

        Host environments cannot be restored: they are seeded from the actor's key. What a rollout
        before them ended in was bootstrapped, so their episodes are truncated, not terminated.
        """
        cut = np.count_nonzero(state.actors.statistics.episode_length)
        actors = self._begin_actors(lambda collector, a: collector.restart(_at(state.actors, a)))
        return state.replace(actors=actors), int(cut)

    def collect(self, state: PyTree) -> tuple[PyTree, Rollout]:
        """Every actor's environments in turn: the state after them, and rollouts [A, ...]."""
        params = self.agent.acting_params(state.learner)
        pairs = [
            collector.collect(params, _at(state.actors, a), self.agent.num_steps)
            for a, collector in enumerate(self.collectors)
        ]
        actors, rollouts = (_stack(*trees) for trees in zip(*pairs))
        return state.replace(actors=actors), rollouts

    def update(self, carry: Carry, rollouts: Rollout) -> Carry:
        """Learn from one rollout of each actor; the old carry's memory is reused."""
        return _update(self._placed, carry, rollouts, reduction=self.reduction)

    def advance(self, carry: Carry, count: int) -> Carry:
        """`count` iterations; 0 compile everything, and touch no environment."""
        if not count:
            rollouts = self._rehearse(carry["state"].learner, carry["state"].actors)
            jax.block_until_ready(self.update(jax.tree.map(jnp.copy, carry), rollouts))
        for done in range(count):
            self.is_collecting = True
            try:
                state, rollouts = self.collect(carry["state"])
            except (KeyboardInterrupt, SystemExit):
                self.left = carry, done
                raise
            finally:
                self.is_collecting = False
            carry = self.update({**carry, "state": state}, rollouts)
        return carry

    def close(self) -> None:
        """Close every environment."""
        for collector in self.collectors:
            collector.envs.close()

    def _begin_actors(self, begin: Callable[[HostCollector, int], ActorState]) -> ActorState:
        actors = [begin(collector, a) for a, collector in enumerate(self.collectors)]
        return _stack(*(self.agent.prepare_actor(actor) for actor in actors))

    def _rehearse(self, learner: Any, actors: ActorState) -> Rollout:
        """Rollouts [A, ...] as `collect` gives them, of environments in which nothing happens."""
        params, steps = self.agent.acting_params(learner), self.agent.num_steps
        rollout = self.collectors[0].rehearse(params, _at(actors, 0), steps)
        return _stack(*[rollout] * len(self.collectors))


def make_program(agent: Any, mesh: Mesh | None, reduction: str) -> Program:
    """The program that fits the agent's environment."""
    return (HostProgram if agent.is_host else Program)(agent, mesh, reduction)


def _at(tree: PyTree, index: int) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree)


@jax.jit
def _stack(*trees: PyTree) -> PyTree:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)
