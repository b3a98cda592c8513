"""OnPolicyAgent: collect a rollout, turn it into targets, take epochs of minibatches, repeat.

An algorithm of this kind gives a loss; PPO and A2C are two, and a user's own is a third.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxroll import estimators, losses
from jaxroll.agents.base import PLAN_FOLD, DistributedAgent
from jaxroll.agents.hyperparameters import leaf, static
from jaxroll.agents.shared import ExplainedVariance, clear_rows
from jaxroll.agents.states import LearnerState, TrainState, key_shape
from jaxroll.checks import check_divides
from jaxroll.learner import Reduction, map_actors, minibatch_updates, sum_actors
from jaxroll.metrics import Last, Mean, Sum, as_metrics
from jaxroll.storages import RolloutStorage, Storage
from jaxroll.types import Array, Minibatch, PolicyOutput, PyTree, Rollout


class OnPolicyAgent(DistributedAgent):
    """An agent that learns from its newest rollout only; subclass it and give `loss`.

    Example, the plain policy gradient:
      >>> class Plain(OnPolicyAgent):
      ...     def loss(self, params, batch):
      ...         log_prob = self.outputs(params, batch).distribution.log_prob(
      ...             batch.transition.action)
      ...         loss, weight = losses.policy_gradient_loss(
      ...             log_prob, batch.targets.advantages, batch.weights)
      ...         return loss, weight, {"loss": Mean(loss, weight)}
      >>> plain = Plain.create("CartPole-v1", num_envs=4, num_steps=8)
      >>> state = jax.eval_shape(plain.init, jax.random.key(0))
      >>> "loss" in jax.eval_shape(plain.train_step, state)[1]
      True

    The policy's `value` may be a dict of streams, and the rewards of a rollout a dict of the same
    keys (`run` may add one, such as a bonus for novelty). Each stream then has its own returns and
    advantages; γ, λ and the weight of its advantages may be dicts too:

      A = Σ c A(stream)

    Example, a second stream of rewards that counts half:
      >>> import jaxroll
      >>> class Curious(jaxroll.PPO):
      ...     def run(self, learner, actor):
      ...         actor, rollout = super().run(learner, actor)
      ...         step = rollout.transition
      ...         bonus = jnp.abs(step.obs[..., 0])
      ...         step = step.replace(reward={"extrinsic": step.reward, "intrinsic": bonus})
      ...         return actor, rollout.replace(transition=step)
      >>> def apply(params, carry, obs, is_first):
      ...     value = {name: obs @ params[name] for name in ("extrinsic", "intrinsic")}
      ...     distribution = jaxroll.distributions.Categorical(obs @ params["policy"])
      ...     return carry, jaxroll.PolicyOutput(distribution, value)
      >>> def init(key, obs):
      ...     zeros = jnp.zeros(4)
      ...     return {"policy": jnp.zeros((4, 2)), "extrinsic": zeros, "intrinsic": zeros}
      >>> agent = Curious.create(
      ...     "CartPole-v1",
      ...     policy=jaxroll.networks.FunctionPolicy(init, apply),
      ...     discount={"extrinsic": 0.99, "intrinsic": 0.999},
      ...     gae_lambda=0.95,
      ...     stream_coef={"extrinsic": 1.0, "intrinsic": 0.5},
      ... )
      >>> state = jax.eval_shape(agent.init, jax.random.key(0))
      >>> state.learner.params["intrinsic"].shape
      (4,)
    """

    storage: Any = struct.field(pytree_node=False, default=None)

    discount: PyTree = leaf(0.99, "γ; or one for each stream of values", "in [0, 1]", streams=True)
    gae_lambda: PyTree = leaf(
        0.95, "λ of the advantage estimate; or one for each stream", "in [0, 1]", streams=True
    )
    stream_coef: PyTree = leaf(
        1.0, "weight of each stream's advantages, where values have streams", ">= 0", streams=True
    )
    num_epochs: int = static(1, "passes over each rollout", ">= 1")
    num_mini_batch: int = static(1, "minibatches per pass", ">= 1")
    normalize_advantage: str | None = static(
        "minibatch",
        "advantages to mean 0 and deviation 1: per minibatch, per rollout, or none",
        choices=("minibatch", "rollout", None),
    )
    sequence_length: int | None = static(
        None, "steps of a training sequence of a recurrent policy; none: the whole rollout", ">= 1"
    )
    adam_epsilon: Array = leaf(1e-5, "ε of Adam", "> 0")

    @classmethod
    def create(cls, env: Any, *, policy: Any = None, storage: Any = None, **hyperparameters: Any):
        """As `DistributedAgent.create`.

        Args:
          env: an environment or its name.
          policy: a `Policy` of your own.
          storage: makes the storage from one step: `MyStorage.create_factory(num_steps=…)`, as
            long as the rollout. Its discount and gae_lambda follow the agent's, unless they are
            dicts with a number for each stream of values. None: `RolloutStorage`.
          **hyperparameters: see `cls.hyperparameters()`.
        """
        if storage is not None and not callable(storage):
            raise TypeError(
                "storage must be a function from one step to a storage, such as "
                f"RolloutStorage.create_factory(num_steps), got {storage!r}."
            )
        agent = super().create(env, policy=policy, **hyperparameters).replace(storage=storage)
        module = getattr(type(agent).loss, "__module__", None)  # None in code that exec runs
        is_own = module is None or not module.startswith("jaxroll.")
        is_single = all(np.ndim(x) == 0 for x in jax.tree.leaves(agent))
        if is_own and is_single and not agent.is_host:  # a loss of the user's: shapes alone
            jax.eval_shape(lambda key: agent.train_step(agent.init(key)), key_shape())
        return agent

    def _validate(self) -> None:
        super()._validate()
        per_actor = self.envs_per_actor * self.num_steps
        what = f"envs per actor * num_steps = {self.envs_per_actor} * {self.num_steps}"
        length = self.sequence_length or self.num_steps
        check_divides("sequence_length", length, self.num_steps, "num_steps")
        if self.network in ("lstm", "gru"):
            per_actor = per_actor // length
            what = f"sequences per actor = {self.envs_per_actor} * {self.num_steps} / {length}"
        elif self.sequence_length is not None and self.policy is None:
            raise ValueError(
                f"sequence_length = {self.sequence_length} is for recurrent policies, got network "
                f'{self.network!r}. Use network="lstm", or leave it out.'
            )
        check_divides("num_mini_batch", self.num_mini_batch, per_actor, what)

    def _check_policy(self) -> PyTree:
        value = super()._check_policy()
        streams = sorted(value) if isinstance(value, dict) else None
        for name in ("discount", "gae_lambda", "stream_coef"):
            given = getattr(self, name)
            if isinstance(given, dict) and sorted(given) != streams:
                of_policy = "a single array" if streams is None else f"of the streams {streams}"
                raise ValueError(
                    f"{name} has the streams {sorted(given)}, but the policy's value is "
                    f"{of_policy}. Give one number, or one for each stream of the policy."
                )
        if streams is not None and self.normalize_rewards:
            raise ValueError(
                f"normalize_rewards scales one stream of rewards, but the policy's value has "
                f"{streams}. Scale them where they are made, and leave it out."
            )
        return value

    @abc.abstractmethod
    def loss(self, params: PyTree, batch: Minibatch) -> tuple[Array, Array, dict[str, Any]]:
        """(Σ w·ℓ, Σ w, metrics) over one actor's minibatch.

        Args:
          params: of the policy; give them to `self.outputs(params, batch)`.
          batch: leaves [N, ...], or [L, N, ...] sequences for a recurrent policy.

        The batch comes from `prepare`: its `targets.advantages` are what to use. A plain array as
        a metric counts as a mean. A loss that only adds up rows is faster on a CPU if it says so:
        decorate it with `jaxroll.learner.adds_over_rows`.
        """

    def outputs(self, params: PyTree, batch: Minibatch) -> PolicyOutput:
        """What the policy says of the minibatch now, recurrent or not."""
        step = batch.transition
        if batch.initial_carry is None:
            return self.policy.apply(params, (), step.obs, step.is_first)[1]
        return self.policy.unroll(params, batch.initial_carry, step.obs, step.is_first)[1]

    def prepare(self, batch: Minibatch) -> Minibatch:
        """What the loss sees of an actor's minibatch: called before the loss, on all its rows.

        Advantages are added over streams and normalised, if so chosen; rows that are not valid are
        cleared, so that a NaN in one reaches no gradient.
        """
        targets = batch.targets
        if targets is not None and targets.advantages is not None:
            advantages = self._combined(targets.advantages)
            if self.normalize_advantage == "minibatch":
                advantages = estimators.normalize(advantages, batch.weights)
            targets = targets.replace(advantages=advantages)
        step = batch.transition
        if step.valid is not None:
            step = clear_rows(step, batch.weights)
        return batch.replace(transition=step, targets=targets)

    def _combined(self, advantages: PyTree) -> Array:
        """Σ c A over the streams; a single stream as it is."""
        if not isinstance(advantages, dict):
            return advantages
        coefs = self.stream_coef
        coefs = coefs if isinstance(coefs, dict) else dict.fromkeys(advantages, coefs)
        return jnp.asarray(sum(coefs[name] * advantages[name] for name in sorted(advantages)))

    @property
    def collect_options(self) -> dict[str, Any]:
        """Options of the collector."""
        return {"max_truncations": self.max_truncations, "sequence_length": self.sequence_length}

    # The learner.

    def optimizer(self, learning_rate: Array) -> optax.GradientTransformation:
        """Adam behind a clip of the gradient's norm."""
        return optax.flatten(  # one vector: a dozen small leaves cost more than their work
            optax.chain(
                optax.clip_by_global_norm(self.max_grad_norm),
                optax.adam(learning_rate, eps=self.adam_epsilon),
            )
        )

    def init_optimizer(self, params: PyTree) -> PyTree:
        """Adam's moments at zero."""
        return self.optimizer(self.learning_rate).init(params)

    def fill(self, rollout: Rollout) -> Storage:
        """A storage with one actor's rollout and its targets."""
        example = jax.tree.map(lambda x: x[0], rollout.transition)
        carry = None
        if jax.tree.leaves(rollout.initial_carry):
            carry = jax.tree.map(lambda x: x[0], rollout.initial_carry)
        storage = self.make_storage(example, carry)
        storage = storage.insert_data_slice(rollout.transition, rollout.initial_carry)
        storage = storage.before_gradients(rollout.last_value)
        storage._check_targets()  # here it is known whether a `before_gradients` gave them
        if self.normalize_advantage == "rollout":  # of all streams together, as the loss adds them
            contents = storage.contents()
            advantages = self._combined(contents.targets.advantages)
            advantages = estimators.normalize(advantages, contents.weights)
            storage = storage.replace(targets=contents.targets.replace(advantages=advantages))
        return storage

    def make_storage(self, example: Any, carry: PyTree) -> Any:
        """An empty storage; its discount and λ are the agent's, unless each stream has its own."""
        if self.storage is None:
            return RolloutStorage.create(
                example,
                self.num_steps,
                discount=self.discount,
                gae_lambda=self.gae_lambda,
                initial_carry=carry,
                sequence_length=self.sequence_length,
            )
        storage = self.storage(example)
        num_steps = getattr(storage, "num_steps", self.num_steps)
        if num_steps != self.num_steps:  # rows that are never written would weigh 0
            raise ValueError(
                f"the storage must have the rollout's num_steps = {self.num_steps}, got "
                f"{num_steps}. Use create_factory(num_steps={self.num_steps}), or give the agent "
                f"num_steps={num_steps}."
            )
        options = getattr(self.storage, "options", None)
        for name in ("discount", "gae_lambda"):
            if name not in storage.parameters:
                continue
            # A factory makes dicts of single numbers too; those follow the agent.
            given = getattr(storage, name) if options is None else options.get(name)
            if not isinstance(given, dict):
                storage = storage.update_storage_parameter(name, getattr(self, name))
            elif isinstance(getattr(self, name), dict):
                raise ValueError(
                    f"{name} of each stream is given to the agent and to its storage. Leave out "
                    "one of the two."
                )
        return storage

    def plan_key(self, actor: Any) -> jax.Array:
        """The key of an actor's minibatch plans for the rollout that it has just collected."""
        rollout_key = jax.random.fold_in(actor.key, actor.num_rollouts - 1)
        return jax.random.fold_in(rollout_key, PLAN_FOLD)

    def update(
        self,
        state: TrainState,
        rollouts: Rollout,
        *,
        axis_name: Any = None,
        reduction: Reduction = "fast",
    ) -> tuple[TrainState, dict[str, Any]]:
        """Epochs of minibatches over one rollout of each actor."""
        across = {"axis_name": axis_name, "reduction": reduction}
        before = state.learner
        learner, actors, rollouts = self.update_normalizers(
            before, state.actors, rollouts, **across
        )
        storages = map_actors(self.fill, rollouts, reduction=reduction)
        params, opt_state, metrics, num_updates = self.learn(before, actors, storages, across)
        metrics |= self.episode_metrics(rollouts, **across)
        counters = map_actors(
            lambda storage: storage.after_gradients({})[1], storages, reduction=reduction
        )
        metrics |= {k: Sum(v) for k, v in sum_actors(counters, **across).items()}
        metrics["explained_variance"] = ExplainedVariance(
            sum_actors(map_actors(_explained_variance, storages, reduction=reduction), **across)
        )
        metrics["learning_rate"] = Last.of(self.current_learning_rate(before))
        learner = learner.replace(params=params, opt_state=opt_state)
        learner = self.advance_counters(learner, num_updates, metrics["episodes"].total)
        return TrainState(learner=learner, actors=actors), metrics

    def learn(
        self, learner: LearnerState, actors: Any, storages: Any, across: dict[str, Any]
    ) -> tuple[PyTree, PyTree, dict[str, Any], Any]:
        """(params, opt_state, metrics, optimiser steps) after all epochs."""
        plans = map_actors(
            lambda actor, storage: storage.plan(
                self.plan_key(actor),
                num_mini_batch=self.num_mini_batch,
                num_epochs=self.num_epochs,
            ),
            actors,
            storages,
            reduction=across["reduction"],
        )
        params, opt_state, metrics, report = minibatch_updates(
            lambda params, batch: checked_loss(
                self.loss, self.with_normalizer(params, learner), batch
            ),
            self.optimizer(self.current_learning_rate(learner)),
            learner.params,
            learner.opt_state,
            storages,
            plans,
            prepare=self.prepare,
            split_rows=plans.sequence_length is None
            and getattr(self.loss, "adds_over_rows", False),
            **across,
        )
        metrics = summed(metrics)
        metrics |= gradient_metrics(report)
        return params, opt_state, metrics, self.num_epochs * self.num_mini_batch


def checked_loss(loss: Callable[..., Any], params: PyTree, batch: Minibatch) -> Any:
    """What a loss returns, if it is (Σ w·ℓ, Σ w, metrics); plain arrays in metrics become means."""
    result = loss(params, batch)
    if (
        not isinstance(result, tuple)
        or len(result) != 3
        or jnp.shape(result[0]) != ()
        or jnp.shape(result[1]) != ()
        or not isinstance(result[2], Mapping)
    ):
        got = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", result)
        raise TypeError(
            "loss must return (Σ w·ℓ, Σ w, metrics): the sum of the weighted losses, the sum of "
            'the weights and a dict such as {"loss": Mean(loss, weight)}. The first two are what '
            f"the functions of jaxroll.losses return. Got {got}."
        )
    return result[0], result[1], as_metrics(dict(result[2]))


def summed(metrics: PyTree) -> Any:
    """Metrics of all minibatches, [E·M, ...], added up."""
    return jax.tree.map(lambda x: jnp.sum(x, 0, dtype=x.dtype), metrics)


def gradient_metrics(report: dict[str, Array]) -> dict[str, Any]:
    """`grad_norm` and `nonfinite` of all minibatches."""
    return {
        "grad_norm": Mean.of(report["grad_norm"]),
        "nonfinite": Sum(report["nonfinite"]),
    }


def _explained_variance(storage: Any) -> losses.ExplainedVarianceSums:
    contents = storage.contents()
    values = sum(jax.tree.leaves(contents.transition.value))
    returns = sum(jax.tree.leaves(contents.targets.returns))
    return losses.explained_variance_sums(
        jnp.asarray(values), jnp.asarray(returns), contents.weights
    )
