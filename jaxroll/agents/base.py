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
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jaxroll import collectors, envs, losses, networks, spaces
from jaxroll.agents.hyperparameters import hyperparameters_of, leaf, resolve, static
from jaxroll.checks import check_divides, check_flag, check_key
from jaxroll.counts import count_add, count_float, count_zero
from jaxroll.distributions import sample
from jaxroll.export import export_policy
from jaxroll.learner import Reduction, check_reduction, gather_actors, map_actors, sum_actors
from jaxroll.metrics import Mean, Sum
from jaxroll.normalizers import (
    NormalizedParams,
    NormalizedPolicy,
    RewardScaler,
    RunningStatistics,
    discounted_sums,
)
from jaxroll.types import ActorState, Array, Node, PyTree, Rollout, Transition

# Folded into a rollout's key for the minibatch plans: far from the numbers that `split` uses.
PLAN_FOLD = 2**30
_NETWORK_OPTIONS = ("network", "hidden_sizes", "activation", "shared_torso", "squash")


class LearnerState(Node):
    """What all actors and learners have in common; replicated over the devices.

    Attributes:
      params: of the policy.
      opt_state: of the optimiser.
      obs_statistics: where observations are normalised, else None.
      reward_scaler: where rewards are normalised, else None.
      iteration: [] int32 train steps done.
      version: [] int32 optimiser steps done.
      num_episodes: [2] uint32 episodes finished (see `jaxroll.counts`).
      num_env_steps: [2] uint32 environment steps taken.
      extras: an algorithm's own state: saved, replicated and swept like the rest.
    """

    params: PyTree
    opt_state: PyTree
    obs_statistics: RunningStatistics | None
    reward_scaler: RewardScaler | None
    iteration: Array
    version: Array
    num_episodes: Array
    num_env_steps: Array
    extras: PyTree = None


class TrainState(Node):
    """Everything that training changes: save it, and the run goes on as if it had not stopped.

    Example, its shapes:
      >>> import jaxroll
      >>> ppo = jaxroll.PPO.create("CartPole-v1", num_envs=8, num_actors=2)
      >>> state = jax.eval_shape(ppo.init, jax.random.key(0))
      >>> state.learner.iteration.shape, state.actors.obs.shape
      ((), (2, 4, 4))

    Attributes:
      learner: replicated over the devices.
      actors: leaves [A, ...], spread over the devices.
      storage: what outlives an iteration, such as IMPALA's ring of unrolls.
    """

    learner: LearnerState
    actors: ActorState
    storage: PyTree = None


class DistributedAgent(Node, abc.ABC):
    """The base of every agent.

    An algorithm gives `init_optimizer` and `update`; `OnPolicyAgent` gives both and asks for a loss
    only. Who calls each hook, and when:

    - `create` calls `_validate` (sizes), then `_default_policy` if no policy was given, then, by
      shapes alone, `init_learner` and the policy with `acting_params`.
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

    `policy` holds no params. A trained policy, with a state's params in it, is what `act(state)`
    gives, as a plain function; `export` writes the same to a file.

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
        return networks.make_policy(
            self.env.observation_space,
            self.env.action_space,
            network=self.network,
            hidden_sizes=self.hidden_sizes,
            activation=self.activation,
            shared_torso=self.shared_torso,
            squash=self.squash,
        )

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
    def env_name(self) -> str:
        """How the environment is called in logs."""
        env = self.env
        while not hasattr(env, "name") and hasattr(env, "env"):
            env = env.env  # what a wrapper without a name of its own is around
        return str(getattr(env, "name", type(env).__name__))

    @property
    def is_host(self) -> bool:
        """Whether the environment runs on the host, outside jit."""
        return isinstance(self.env, envs.HostEnvSpec)

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has a carry."""
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.policy.initial_carry(1))))

    # Pure: from a key to a state, from a state to the next.

    def init(self, key: jax.Array) -> TrainState:
        """The state before the first step.

        Args:
          key: a PRNG key; its split gives the params' key and the actors' key.
        """
        if self.is_host:
            raise TypeError(
                f"{self.env} runs on the host, so its reset is not pure. Use agent.train(...), or "
                "a jaxroll.collectors.HostCollector and agent.update in a loop of your own."
            )
        params_key, actors_key = jax.random.split(check_key("key", key))
        learner = self.init_learner(params_key)
        actors = jax.vmap(self.init_actor)(self.actor_keys(actors_key))

        def run(state: TrainState) -> tuple[TrainState, Rollout]:
            # One actor after the other: what is in the state must not depend on the devices.
            actors, rollouts = map_actors(
                lambda actor: self.run(state.learner, actor), state.actors, reduction="exact"
            )
            return state.replace(actors=actors), rollouts

        if not self.num_prefills:
            return self.assemble(learner, actors)
        bare = TrainState(learner=learner, actors=actors)
        state = self.assemble(learner, actors, jax.eval_shape(run, bare)[1])
        return jax.lax.fori_loop(
            0, self.num_prefills, lambda _, state: self.prefill(*run(state)), state
        )

    def assemble(
        self, learner: LearnerState, actors: ActorState, rollouts: Any = None
    ) -> TrainState:
        """The state from its parts.

        Args:
          learner: from `init_learner`.
          actors: leaves [A, ...].
          rollouts: shapes of a rollout of every actor, for algorithms that store them.
        """
        return TrainState(learner=learner, actors=actors)

    def store(self, state: TrainState, rollouts: Rollout) -> TrainState:
        """Store a rollout of every actor without learning from it: what fills a ring at first."""
        return state

    def prefill(self, state: TrainState, rollouts: Rollout) -> TrainState:
        """`store` one of the rollouts that fill the storage at first, and count its steps."""
        state = self.store(state, rollouts)
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
        _check_state(state)
        actors, rollouts = map_actors(
            lambda actor: self.run(state.learner, actor), state.actors, reduction=reduction
        )
        return self.update(
            state.replace(actors=actors), rollouts, axis_name=axis_name, reduction=reduction
        )

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

    def update_normalizers(
        self,
        learner: LearnerState,
        actors: ActorState,
        rollouts: Rollout,
        *,
        axis_name: Any,
        reduction: Any,
    ) -> tuple[LearnerState, ActorState, Rollout]:
        """Scaled rewards and updated statistics; scaled by those from before the rollout.

        Statistics are updated between rollouts and pooled over all actors; in exact mode in their
        order, so that they do not depend on the devices.
        """
        transition = rollouts.transition

        def merged(before: RunningStatistics, stacked: RunningStatistics) -> RunningStatistics:
            if reduction == "exact":
                return before.merge_all(gather_actors(stacked, axis_name=axis_name))
            return before.merge_pooled(stacked, axis_name)

        if learner.obs_statistics is not None:
            params = self.acting_params(learner)
            stacked = map_actors(
                lambda step: self.policy.batch_statistics(params, step.obs, _valid_weights(step)),
                transition,
                reduction=reduction,
            )
            learner = learner.replace(obs_statistics=merged(learner.obs_statistics, stacked))
        if learner.reward_scaler is not None:
            scaler = learner.reward_scaler

            def sums_of(before: Array, step: Any) -> tuple[Array, RunningStatistics]:
                sums, after = discounted_sums(
                    step.reward, step.terminated, step.truncated, before, self.discount
                )
                return after, scaler.statistics.batch_statistics(sums, _valid_weights(step))

            sums, stacked = map_actors(sums_of, actors.reward_sums, transition, reduction=reduction)
            scaled = transition.replace(reward=scaler.scale(transition.reward))
            rollouts = rollouts.replace(transition=scaled)
            scaler = scaler.replace(statistics=merged(scaler.statistics, stacked))
            learner = learner.replace(reward_scaler=scaler)
            actors = actors.replace(reward_sums=sums)
        return learner, actors, rollouts

    def episode_metrics(
        self, rollouts: Rollout, *, axis_name: Any, reduction: Any
    ) -> dict[str, Any]:
        """Returns and lengths of the episodes that ended, what did not fit, what was no step."""
        overflow = None if rollouts.final is None else rollouts.final.overflow
        valid = rollouts.transition.valid
        if valid is not None:
            flags = valid.reshape(len(valid), -1).astype(jnp.float32)
            valid = flags.sum(1), jnp.full(len(flags), flags.shape[1], jnp.float32)
        episodes, overflow, valid = sum_actors(
            (rollouts.episodes, overflow, valid), axis_name=axis_name, reduction=reduction
        )
        count = episodes.count.astype(jnp.float32)
        metrics = {
            "episode_return": Mean(episodes.return_sum, count),
            "episode_length": Mean(episodes.length_sum, count),
            "episodes": Sum(episodes.count),
        }
        if overflow is not None:
            metrics["final_overflow"] = Sum(overflow)
        if valid is not None:
            metrics["valid_fraction"] = Mean(*valid)
        return metrics

    # The shell.

    def train(self, num_train_steps: int, **options: Any) -> tuple[TrainState, Any]:
        """Train until `num_train_steps` environment steps, with a progress bar.

        Args:
          num_train_steps: of the whole run, what was done before a resume included.
          **options: see `jaxroll.train.train`: seed, state, mesh, reduction, checkpoint_dir,
            resume, init_model_path, callbacks, eval_interval, target_return, time_budget, …

        Returns:
          (state, history).
        """
        from jaxroll import train

        return train.train(self, num_train_steps, **options)

    def eval(
        self,
        state: TrainState,
        num_episodes: int = 32,
        *,
        seed: int = 0,
        deterministic: bool = True,
        env: Any = None,
    ) -> dict[str, Any]:
        """Play whole episodes: mean `episode_return`, `episode_length`, and each episode's.

        An episode that does not end (within 100,000 steps for each that its environment plays) is
        counted in `num_unfinished` and warned of; the means are without it.

        Args:
          state: a TrainState.
          num_episodes: exactly this many are played.
          seed: of the episodes.
          deterministic: act with the distribution's mode.
          env: another environment with the same spaces; None: the agent's own.
        """
        from jaxroll import train

        return train.evaluate(
            self, state, num_episodes, seed=seed, deterministic=deterministic, env=env
        )

    def save(self, state: TrainState, path: Any, *, overwrite: bool = False) -> None:
        """Write the whole state to a directory, verified when it is loaded."""
        from jaxroll import train

        train.save(self, state, path, overwrite=overwrite)

    def load(self, path: Any) -> TrainState:
        """The state that `save` (or a checkpoint of `train`) wrote."""
        from jaxroll import train

        return train.load(self, path)

    def export(self, state: TrainState, path: Any, **options: Any) -> Any:
        """Write the policy to a file that runs with JAX alone.

        Args:
          state: a TrainState.
          path: the file to write.
          **options: see `jaxroll.export.export_policy`: batch_size, deterministic, platforms.
        """
        return export_policy(self, state, path, **options)

    def act(self, state: TrainState, *, deterministic: bool = True) -> Callable[..., Any]:
        """The trained policy taken out as a plain function: `act(obs, carry=…, is_first=…, key=…)`.

        Args:
          state: a TrainState; its params, and the statistics that normalise, become part of it.
          deterministic: the distribution's mode; False: a sample, drawn from `key`.

        Returns:
          a function of observations [B, ...] that gives actions [B, ...]; for a recurrent policy
          (actions, carry).

        Example:
          >>> import jax, jax.numpy as jnp, jaxroll
          >>> ppo = jaxroll.PPO.create("CartPole-v1", num_envs=4, num_steps=8, num_mini_batch=1)
          >>> act = ppo.act(jax.jit(ppo.init)(jax.random.key(0)))
          >>> act(jnp.zeros((2, 4))).shape
          (2,)
        """
        _check_state(state)
        check_flag("deterministic", deterministic)
        params = self.acting_params(state.learner)
        policy, recurrent = self.policy, self.is_recurrent

        @jax.jit
        def act(obs: PyTree, carry: Any = None, is_first: Any = None, key: Any = None) -> Any:
            batch = jax.tree.leaves(obs)[0].shape[0]
            carry = policy.initial_carry(batch) if carry is None else carry
            is_first = jnp.zeros(batch, bool) if is_first is None else is_first
            carry, output = policy.apply(params, carry, obs, is_first)
            if deterministic:
                action = output.distribution.mode()
            elif key is None:
                raise ValueError(
                    "a stochastic policy needs a key: act(obs, key=jax.random.key(0))."
                )
            else:
                action = sample(output.distribution, key)
            return (action, carry) if recurrent else action

        return act


def _valid_weights(transition: Any) -> Array:
    if transition.valid is not None:
        return transition.valid.astype(jnp.float32)
    return jnp.ones(transition.terminated.shape, jnp.float32)


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(f"state must be a TrainState, as agent.init(key) gives it, got {state!r}.")


def clear_rows(transition: Transition, weights: Array) -> Transition:
    """Zeros in rows of weight 0, flags and masks apart: such rows may hold anything, NaN too."""

    def clear(x: Array) -> Array:
        return x if x.dtype == bool else losses.safe_rows(x, weights)

    return jax.tree.map(clear, transition)


def key_shape() -> Any:
    """The shape of a key, for `jax.eval_shape`."""
    return jax.eval_shape(lambda: jax.random.key(0))
