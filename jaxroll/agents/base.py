"""DistributedAgent: what an algorithm is, and what follows from it.

An agent is a frozen value: environment, policy and sizes are static, every number that enters a
formula is a leaf. `init`, `run`, `update` and `train_step` are pure; they can be jitted, scanned,
vmapped (over seeds and over hyperparameters) and put on a mesh. `train`, `eval`, `save` and `load`
are the shell around them.

Keys: `key` splits into the params' key and the actors' key; actor a has `fold_in(actors_key, a)`
and its rollout u draws from `fold_in(actor_key, u)`. Nothing depends on the device.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jaxroll import collectors, envs, networks, spaces
from jaxroll.agents.hyperparameters import hyperparameters_of, leaf, resolve, static
from jaxroll.agents.shared import episode_metrics, update_normalizers
from jaxroll.agents.shell import Shell
from jaxroll.agents.states import LearnerState, TrainState, check_state, key_shape
from jaxroll.checks import check_divides, check_key
from jaxroll.counts import count_add, count_float, count_zero
from jaxroll.learner import Reduction, check_reduction, map_actors
from jaxroll.normalizers import NormalizedParams, NormalizedPolicy, RewardScaler
from jaxroll.types import ActorState, Array, Node, PyTree, Rollout

# Folded into a rollout's key for the minibatch plans: far from the numbers that `split` uses.
PLAN_FOLD = 2**30
_NETWORK_OPTIONS = ("network", "hidden_sizes", "activation", "shared_torso", "squash", "dtype")


class DistributedAgent(Shell, Node, abc.ABC):
    """The base of every agent.

    An algorithm gives `init_optimizer` and `update`; `OnPolicyAgent` gives both and asks for a loss
    only. Who calls each hook, and when:

    - `create` calls `_validate` (sizes), `_default_policy` if no policy was given, and, by shapes
      alone, `init_learner` and the policy with `acting_params`.
    - `init` calls `init_learner` once, which calls `policy.init`, `init_optimizer` and
      `init_extras`; `init_actor` for each actor, which calls `prepare_actor`; `assemble`; then
      `prefill`, which calls `store`, `num_prefills` times.
    - `train_step` calls `run` for each actor, with `acting_params` and `collect_options`, and then
      `update` once for all of them.
    - `update` is the algorithm's. The shared ones call `update_normalizers` first, the loss with
      params from `with_normalizer`, and `episode_metrics` and `advance_counters` at the end.

    With a host environment, a collector takes the place of `init_actor` and `run`.

    An algorithm's own state is `LearnerState.extras`: `init_extras` makes it, `update` returns a
    new one, and it is saved, replicated and swept as params are.

    Example, an agent that acts and counts but never learns:
      >>> import jaxroll
      >>> class Idle(DistributedAgent):
      ...     def init_optimizer(self, params):
      ...         return ()
      ...
      ...     def update(self, state, rollouts, *, axis_name=None, reduction="fast"):
      ...         learner = state.learner.replace(iteration=state.learner.iteration + 1)
      ...         across = {"axis_name": axis_name, "reduction": reduction}
      ...         return state.replace(learner=learner), self.episode_metrics(rollouts, **across)
      >>> idle = Idle.create("CartPole-v1", num_envs=4, num_steps=8, num_actors=2)
      >>> state = jax.eval_shape(idle.init, jax.random.key(0))
      >>> sorted(jax.eval_shape(idle.train_step, state)[1])
      ['episode_length', 'episode_return', 'episodes', 'final_overflow']
    """

    name: ClassVar[str] = "agent"

    env: Any = struct.field(pytree_node=False, default=None)
    policy: Any = struct.field(pytree_node=False, default=None)

    num_envs: int = static(64, "environments in total, over all actors", ">= 1")
    num_steps: int = static(128, "steps of each environment per rollout", ">= 1")
    num_actors: int = static(1, "logical actors; part of the experiment, devices are not", ">= 1")
    network: str = static("auto", "auto, mlp, cnn, lstm or gru")
    hidden_sizes: tuple | None = static(None, "widths of the dense layers; none: by observation")
    activation: str | None = static(None, "of the dense layers, such as tanh; none: by observation")
    shared_torso: bool | None = static(
        None,
        "one torso for policy and value; none: only where it is expensive",
        choices=(None, True, False),
    )
    squash: bool = static(False, "press continuous actions into their bounds")
    dtype: str = static(
        "float32",
        "in which the networks compute; params and outputs are float32",
        choices=networks.DTYPES,
    )
    discount: Array = leaf(0.99, "γ", "in [0, 1]")
    learning_rate: Array = leaf(3e-4, "step size of the optimiser", "> 0")
    decay_steps: Array = leaf(
        None, "environment steps until the learning rate is 0; none: constant", "> 0", none=np.inf
    )
    max_grad_norm: Array = leaf(
        0.5, "the gradient's norm is clipped to this; none: not at all", "> 0", none=np.inf
    )
    normalize_observations: bool = static(False, "by their running mean and deviation")
    normalize_rewards: bool = static(False, "by the deviation of their discounted sums")
    max_truncations: int | None = static(
        None,
        "truncated steps per environment and rollout that bootstrap from V(final observation); "
        "none: all",
        ">= 0",
    )

    # Making one.

    @classmethod
    def create(cls, env: Any, *, policy: Any = None, **hyperparameters: Any) -> Self:
        """An agent for an environment; touches no device.

        Args:
          env: a name for `jaxroll.make_env`, an `Env`, or whatever `jaxroll.envs.as_env` takes.
          policy: a `Policy` of your own; None: one of `jaxroll.networks` that fits the spaces.
          **hyperparameters: see `cls.hyperparameters()`, or `jaxroll agents` on the command line.
        """
        if missing := sorted(cls.__abstractmethods__):
            raise TypeError(
                f"{cls.__name__} must define {', '.join(missing)}: "
                f"help({cls.__name__}.{missing[0]}) says what it returns."
            )
        env = envs.as_env(env)
        if isinstance(env, envs.HostEnv):
            raise TypeError(
                f"{cls.__name__} makes its environments itself, as many as num_envs says, but got "
                "open ones. Give a function: jaxroll.envs.from_gymnasium(lambda num_envs: …)."
            )
        agent = cls(env=env, policy=policy, **resolve(cls, hyperparameters))
        agent._validate()
        given = sorted(set(_NETWORK_OPTIONS) & set(hyperparameters))
        if policy is None:
            policy = agent._default_policy()
        elif given:
            raise ValueError(
                f"{given} describe the default policy, but a policy was given. Leave out one of "
                "the two."
            )
        policy = networks.as_policy(policy)
        if agent.normalize_observations:
            policy = NormalizedPolicy(policy)
        agent = dataclasses.replace(agent, policy=policy)
        agent._check_policy()
        return agent

    def __post_init__(self) -> None:
        if isinstance(self.env, str) or (self.policy is None and isinstance(self.discount, float)):
            name = type(self).__name__
            env = repr(self.env) if isinstance(self.env, str) else "env"
            raise TypeError(f"{name}(...) makes no working agent. Use {name}.create({env}, ...).")

    def _implied(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Called by `replace`: hyperparameters are checked as by `create`."""
        known = self.hyperparameters()
        return {k: known[k].check(x) if k in known else x for k, x in changes.items()}

    @classmethod
    def hyperparameters(cls) -> dict[str, Any]:
        """All hyperparameters by name: default, help, rule, whether static."""
        return hyperparameters_of(cls)

    def _default_policy(self) -> Any:
        options = {name: getattr(self, name) for name in _NETWORK_OPTIONS}
        return networks.make_policy(self.env.observation_space, self.env.action_space, **options)

    def _check_policy(self) -> PyTree:
        """The shape of the policy's values [2]; raise if it does not fit spaces or algorithm."""
        obs = spaces.zeros(self.env.observation_space, (2,))
        params = jax.eval_shape(lambda key: self.acting_params(self.init_learner(key)), key_shape())
        return networks.check_policy(self.policy, obs, self.env.action_space, params).value

    def _validate(self) -> None:
        """Raise if the sizes do not fit each other; called by `create` before anything is built."""
        if self.steps_per_iteration >= 2**31:
            raise ValueError(
                f"num_envs * num_steps must be below 2**31, got {self.num_envs} * "
                f"{self.num_steps} = {self.steps_per_iteration}. Use less of either."
            )
        check_divides("num_actors", self.num_actors, self.num_envs, "num_envs")

    # Sizes.

    @property
    def envs_per_actor(self) -> int:
        """B, the environments of one actor."""
        return self.num_envs // self.num_actors

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps that one `train_step` takes."""
        return self.num_envs * self.num_steps

    @property
    def num_prefills(self) -> int:
        """Rollouts of every actor that `init` takes and stores."""
        return 0

    @property
    def prefilled_steps(self) -> int:
        """Environment steps that `init` takes."""
        return self.num_prefills * self.steps_per_iteration

    @property
    def is_host(self) -> bool:
        """Whether the environment runs on the host, outside jit."""
        return isinstance(self.env, envs.HostEnvSpec)

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has a carry."""
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.policy.initial_carry(1))))

    # Pure: from a key to a state, from a state to the next.

    def init(self, key: jax.Array, *, axis_name: Any = None) -> TrainState:
        """The state before the first step, the same numbers on any mesh.

        Args:
          key: a PRNG key; its split gives the params' key and the actors' key.
          axis_name: the axis of a shard_map over which actors are spread: the state then has those
            of this device only, and no device ever holds all of them.
        """
        if self.is_host:
            raise TypeError(
                f"{self.env} runs on the host, so its reset is not pure. Use agent.train(...), or "
                "a jaxroll.collectors.HostCollector and agent.update in a loop of your own."
            )
        params_key, actors_key = jax.random.split(check_key("key", key))
        learner = self.init_learner(params_key)
        keys = self.actor_keys(actors_key)
        if axis_name is not None:
            count = self.num_actors // jax.lax.axis_size(axis_name)
            first = jax.lax.axis_index(axis_name) * count
            keys = jax.lax.dynamic_slice_in_dim(keys, first, count)
        # What is in the state is the same on any mesh, so all of it is made as in exact mode.
        actors = map_actors(self.init_actor, keys, reduction="exact")
        if not self.num_prefills:
            return self.assemble(learner, actors)

        def run(state: TrainState) -> tuple[TrainState, Rollout]:
            return self.run_actors(state, "exact")

        bare = TrainState(learner=learner, actors=actors)
        state = self.assemble(learner, actors, jax.eval_shape(run, bare)[1])
        return jax.lax.fori_loop(
            0,
            self.num_prefills,
            lambda _, state: self.prefill(*run(state), axis_name=axis_name),
            state,
        )

    def assemble(
        self, learner: LearnerState, actors: ActorState, rollouts: Any = None
    ) -> TrainState:
        """The state from its parts; `rollouts` are shapes, for algorithms that store them."""
        return TrainState(learner=learner, actors=actors)

    def store(self, state: TrainState, rollouts: Rollout, *, axis_name: Any = None) -> TrainState:
        """Store a rollout of every actor without learning from it: what fills a ring at first."""
        return state

    def prefill(self, state: TrainState, rollouts: Rollout, *, axis_name: Any = None) -> TrainState:
        """`store` one of the rollouts that fill the storage at first, and count its steps."""
        state = self.store(state, rollouts, axis_name=axis_name)
        steps = count_add(state.learner.num_env_steps, self.steps_per_iteration)
        return state.replace(learner=state.learner.replace(num_env_steps=steps))

    def state_specs(self, axis_name: str) -> Any:
        """Where a state lives on a mesh: `learner` on every device, actors spread."""
        everywhere: Any = PartitionSpec()
        spread: Any = PartitionSpec(axis_name)
        return TrainState(learner=everywhere, actors=spread)

    def actor_keys(self, actors_key: jax.Array) -> jax.Array:
        """[A] keys, one for each actor."""
        return jax.vmap(lambda a: jax.random.fold_in(actors_key, a))(jnp.arange(self.num_actors))

    def init_learner(self, key: jax.Array) -> LearnerState:
        """Params, optimiser and counters."""
        obs = jax.tree.map(jnp.asarray, spaces.zeros(self.env.observation_space, (1,)))
        # Under vmap one member after the other: batched QR decompositions (orthogonal kernels) that
        # run side by side can wait for each other forever on a CPU with few threads.
        init = jax.custom_batching.sequential_vmap(self.policy.init)
        params, statistics, scaler = init(key, obs), None, None
        if self.normalize_observations:
            params, statistics = params.policy, params.statistics
        if self.normalize_rewards:
            scaler = jax.tree.map(jnp.asarray, RewardScaler.create(self.discount))
        return LearnerState(
            params=params,
            opt_state=self.init_optimizer(params),
            obs_statistics=statistics,
            reward_scaler=scaler,
            iteration=jnp.zeros((), jnp.int32),
            version=jnp.zeros((), jnp.int32),
            num_episodes=count_zero(),
            num_env_steps=count_zero(),
            extras=self.init_extras(params),
        )

    def init_actor(self, key: jax.Array) -> ActorState:
        """One actor with its environments reset."""
        actor = collectors.init_actor(self.env, self.policy, key, self.envs_per_actor)
        return self.prepare_actor(actor)

    def prepare_actor(self, actor: ActorState) -> ActorState:
        """What a fresh actor has beside its environments; called after all were reset."""
        if not self.normalize_rewards:
            return actor
        return actor.replace(reward_sums=jnp.zeros(self.envs_per_actor, jnp.float32))

    def init_extras(self, params: PyTree) -> PyTree:
        """`LearnerState.extras` at the start: an algorithm's own state. None: nothing."""
        return None

    @abc.abstractmethod
    def init_optimizer(self, params: PyTree) -> PyTree:
        """The optimiser's state for these params."""

    def run(self, learner: LearnerState, actor: ActorState) -> tuple[ActorState, Rollout]:
        """What one actor does: a rollout of T steps with the current params."""
        return collectors.collect(
            self.env,
            self.policy,
            self.acting_params(learner),
            actor,
            self.num_steps,
            **self.collect_options,
        )

    def run_actors(self, state: TrainState, reduction: Reduction) -> tuple[TrainState, Rollout]:
        """(state, rollouts [A, ...]) after every actor of this device ran."""
        actors, rollouts = map_actors(
            lambda actor: self.run(state.learner, actor), state.actors, reduction=reduction
        )
        return state.replace(actors=actors), rollouts

    @property
    def collect_options(self) -> dict[str, Any]:
        """Options of the collector, the same for device and host."""
        return {"max_truncations": self.max_truncations}

    @abc.abstractmethod
    def update(
        self,
        state: TrainState,
        rollouts: Rollout,
        *,
        axis_name: Any = None,
        reduction: Reduction = "fast",
    ) -> tuple[TrainState, dict[str, Any]]:
        """What the learner does with one rollout of each actor, leaves [A, ...]."""

    def train_step(
        self, state: TrainState, *, axis_name: Any = None, reduction: Reduction = "fast"
    ) -> tuple[TrainState, dict[str, Any]]:
        """One iteration: every actor runs, the learner updates.

        Args:
          state: of all actors, or of those of this device behind `axis_name`.
          axis_name: the axis of a shard_map, pmap or vmap over which actors are spread.
          reduction: "fast", or "exact" for results that do not depend on the devices.

        Returns:
          (state, metrics): metrics are sums, `jaxroll.metrics.compute` gives the numbers.
        """
        check_reduction(reduction)
        check_state(state)
        state, rollouts = self.run_actors(state, reduction)
        return self.update(state, rollouts, axis_name=axis_name, reduction=reduction)

    # Pieces that algorithms share.

    def with_normalizer(self, params: PyTree, learner: LearnerState) -> PyTree:
        """The policy's params: those that are trained, and the statistics that normalise."""
        if learner.obs_statistics is None:
            return params
        return NormalizedParams(params, learner.obs_statistics)

    def acting_params(self, learner: LearnerState) -> PyTree:
        """What the policy acts with now."""
        return self.with_normalizer(learner.params, learner)

    def current_learning_rate(self, learner: LearnerState) -> Array:
        """Linear to 0 over `decay_steps` environment steps, those that `init` takes included."""
        done = count_float(learner.num_env_steps)
        return self.learning_rate * jnp.clip(1.0 - done / self.decay_steps, 0.0, 1.0)

    update_normalizers = update_normalizers
    episode_metrics = staticmethod(episode_metrics)

    def advance_counters(
        self, learner: LearnerState, num_updates: Array | int, num_episodes: Array
    ) -> LearnerState:
        """The learner's counters after one iteration; called at the end of `update`."""
        return learner.replace(
            iteration=learner.iteration + 1,
            version=learner.version + num_updates,
            num_episodes=count_add(learner.num_episodes, num_episodes),
            num_env_steps=count_add(learner.num_env_steps, self.steps_per_iteration),
        )
