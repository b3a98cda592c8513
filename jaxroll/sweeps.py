"""Sweeps: several seeds, or a grid of hyperparameters, in one compiled program.

A `Sweep` is an agent whose state has a leading axis [N], one entry for each member; the training
loop treats it like any other. Member i draws from the keys of its solo run, so it learns what
`agent.train(seed=…)` learns, to float tolerance. Only leaves can differ between members: what is
static selects another program.

(Not `sweep.py`: importing that would put the module where `jaxroll.sweep`, the function, is.)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jaxroll import train as train_lib
from jaxroll.agents import DistributedAgent, TrainState
from jaxroll.checks import check_count, check_seed, unknown_name
from jaxroll.train.history import History
from jaxroll.types import Array, Node, PyTree


class Sweep(Node):
    """N agents that differ in their seeds and leaves, trained side by side.

    Example:
      >>> import jaxroll
      >>> ppo = jaxroll.PPO.create("CartPole-v1", num_envs=4, num_steps=8)
      >>> Sweep.create(ppo, seeds=[0, 1], hyperparameters={"learning_rate": [1e-3]}).members
      [{'learning_rate': 0.001, 'seed': 0}, {'learning_rate': 0.001, 'seed': 1}]
    """

    agent: DistributedAgent  # swept leaves are [N], the others as they were
    seeds: Array  # [N] uint32
    swept: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @classmethod
    def create(
        cls,
        agent: DistributedAgent,
        *,
        seeds: int | Iterable[int] = (0,),
        hyperparameters: Mapping[str, Sequence[Any]] | None = None,
    ) -> Sweep:
        """Every combination of the hyperparameters' values, with every seed; see `sweep`."""
        if not isinstance(agent, DistributedAgent):
            raise TypeError(f"agent must be an agent, as of jaxroll.PPO.create; got {agent!r}.")
        if agent.is_host:
            raise TypeError(
                f"{agent.env} runs on the host, and a sweep is one program on the device. Train "
                "the members one after the other: agent.train(n, seed=0), agent.train(n, seed=1)."
            )
        given: Any = seeds if _is_list(seeds) else range(check_count("seeds", seeds))
        numbers = [check_seed("seeds", seed) for seed in given]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(
                f"seeds must be different numbers, got {numbers}. Use seeds=8 for 0 … 7."
            )
        values = _check_values(agent, {} if hyperparameters is None else hyperparameters)
        grid = list(itertools.product(*values.values()))
        columns = {
            name: np.repeat(np.asarray([point[i] for point in grid], np.float32), len(numbers))
            for i, name in enumerate(values)
        }
        return cls(
            agent=dataclasses.replace(agent, **columns),
            seeds=np.tile(np.asarray(numbers, np.uint32), len(grid)),
            swept=tuple(values),
        )

    @property
    def members(self) -> list[dict[str, Any]]:
        """For each member its hyperparameters and its seed: the columns of its rows."""
        columns = {name: getattr(self.agent, name) for name in self.swept}
        return [
            {**{k: _shown(v[i]) for k, v in columns.items()}, "seed": int(seed)}
            for i, seed in enumerate(np.asarray(self.seeds))
        ]

    def member(self, index: int) -> Any:
        """The agent of one member, as it would train alone."""
        return dataclasses.replace(
            self.agent, **{name: getattr(self.agent, name)[index] for name in self.swept}
        )

    # The agents' protocol, over all members at once.

    name = property(lambda self: self.agent.name)
    env = property(lambda self: self.agent.env)
    env_name = property(lambda self: self.agent.env_name)
    policy = property(lambda self: self.agent.policy)
    num_actors = property(lambda self: self.agent.num_actors)
    steps_per_iteration = property(lambda self: self.agent.steps_per_iteration)
    prefilled_steps = property(lambda self: self.agent.prefilled_steps)
    is_host = False

    def hyperparameters(self) -> dict[str, Any]:
        """None of its own: they are the members'."""
        return {}

    def init(self, key: jax.Array, **options: Any) -> TrainState:
        """The members' states, stacked; the key is not used, for each member has its seed."""
        return self._over_members(
            lambda agent, seed: agent.init(jax.random.key(seed), **options), self.seeds
        )

    def train_step(self, state: TrainState, **options: Any) -> tuple[TrainState, dict[str, Any]]:
        """One iteration of every member."""
        return self._over_members(lambda agent, state: agent.train_step(state, **options), state)

    def acting_params(self, learner: Any) -> PyTree:
        """What each member acts with, leaves [N, ...]."""
        return self._over_members(lambda agent, learner: agent.acting_params(learner), learner)

    def state_specs(self, axis_name: str) -> Any:
        """As the agent's, behind the members' axis."""
        return jax.tree.map(
            lambda spec: PartitionSpec(None, *spec) if len(spec) else spec,
            self.agent.state_specs(axis_name),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def _over_members(self, function: Callable[[Any, Any], Any], data: PyTree) -> Any:
        paths, structure = jax.tree.flatten_with_path(self.agent)
        axes = [0 if path[0].name in self.swept else None for path, _ in paths]

        def one(leaves: list[Any], data: PyTree) -> Any:
            return function(jax.tree.unflatten(structure, leaves), data)

        return jax.vmap(one, in_axes=(axes, 0))([leaf for _, leaf in paths], data)


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """What a sweep learned."""

    sweep: Sweep
    states: TrainState  # leaves [N, ...]
    history: History  # a row for each logged step and member, with the members' columns

    @property
    def members(self) -> list[dict[str, Any]]:
        """For each member its hyperparameters and its seed."""
        return self.sweep.members

    def __len__(self) -> int:
        return len(self.members)

    def agent(self, index: int) -> Any:
        """The agent of one member."""
        return self.sweep.member(index)

    def state(self, index: int) -> TrainState:
        """The state of one member, as its solo run would have it."""
        return jax.tree.map(lambda x: x[index], self.states)

    def eval(
        self, num_episodes: int = 32, *, seed: int = 0, deterministic: bool = True
    ) -> list[dict[str, Any]]:
        """One row for each member: its columns, `episode_return`, its deviation and its length.

        `num_unfinished` counts episodes that did not end; the others are without them.

        Args:
          num_episodes: whole episodes for each member, all with the same resets.
          seed: of the episodes.
          deterministic: act with the distribution's mode.
        """
        result = train_lib.evaluate(
            self.sweep, self.states, num_episodes, seed=seed, deterministic=deterministic
        )
        names = ("episode_return", "episode_return_std", "episode_length", "num_unfinished")
        return [
            {**columns, **{name: result[name][i] for name in names}}
            for i, columns in enumerate(self.members)
        ]

    def best(self, name: str = "episode_return") -> int:
        """The index of the member with the highest last value of a column.

        A single row is noisy: `max(result.eval(100), key=lambda row: row["episode_return"])` is
        the better question where it matters.
        """
        if name not in self.history:
            raise KeyError(unknown_name("column", name, self.history.names, "the history"))
        last = [self.history.select(**columns).last(name) for columns in self.members]
        if all(math.isnan(x) for x in last):
            raise ValueError(f"no member has a value of {name!r} yet: train for longer.")
        return int(np.nanargmax(last))


def sweep(
    agent: DistributedAgent,
    num_train_steps: int,
    *,
    seeds: int | Iterable[int] = (0,),
    hyperparameters: Mapping[str, Sequence[Any]] | None = None,
    nonfinite: Literal["stop", "skip"] = "skip",
    **options: Any,
) -> SweepResult:
    """Train N seeds, or a grid of hyperparameters, in one compiled program.

    Args:
      agent: with a JAX environment; its hyperparameters are those of every member.
      num_train_steps: environment steps of each member.
      seeds: of the members; a number n stands for 0 … n − 1.
      hyperparameters: name → values, for names of leaves; every combination is a member, with
        every seed.
      nonfinite: as in `jaxroll.train.train`; one member's bad gradient does not stop the others.
      **options: of `jaxroll.train.train`: log_interval, eval_interval, checkpoint_dir, progress, …

    Example:
      >>> import jaxroll
      >>> ppo = jaxroll.PPO.create("CartPole-v1", num_envs=4, num_steps=8)
      >>> result = sweep(ppo, 64, seeds=2, hyperparameters={"discount": [0.9, 0.99]},
      ...                log_interval=64, progress="silent")
      >>> [(row["discount"], row["seed"], row["step"]) for row in result.history]
      [(0.9, 0, 64), (0.9, 1, 64), (0.99, 0, 64), (0.99, 1, 64)]
    """
    members = Sweep.create(agent, seeds=seeds, hyperparameters=hyperparameters)
    states, history = train_lib.train(members, num_train_steps, nonfinite=nonfinite, **options)
    return SweepResult(sweep=members, states=states, history=history)


def _shown(value: Any) -> float | None:
    """The number that was given: 3e-4, not the float32's 0.00030000001; None, not infinity."""
    return float(str(value)) if np.isfinite(value) else None


def _is_list(values: Any) -> bool:
    return np.iterable(values) and not isinstance(values, str | bytes)


def _check_values(agent: DistributedAgent, given: Any) -> dict[str, list[Any]]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"hyperparameters must map names to lists of values, got {given!r}. Use "
            'hyperparameters={"learning_rate": [1e-3, 3e-4]}.'
        )
    known = agent.hyperparameters()
    leaves = [name for name, h in known.items() if not h.is_static]
    for name, values in given.items():
        if name not in known:
            raise ValueError(unknown_name("hyperparameter", name, leaves, agent.name))
        if known[name].is_static:
            raise ValueError(
                f"{name} selects another program, so it cannot differ within a sweep. Sweep over "
                f"leaves ({', '.join(leaves)}), or make a sweep for each value of {name}."
            )
        if not _is_list(values) or not len(values) or any(map(np.iterable, values)):
            raise ValueError(
                f"a sweep needs a list of single values for {name}, got {values!r}. Use "
                f"hyperparameters={{{name!r}: [a, b]}}."
            )
    return {name: [known[name].check(x) for x in values] for name, values in given.items()}
