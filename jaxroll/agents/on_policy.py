"""OnPolicyAgent: collect a rollout, turn it into targets, take epochs of minibatches, repeat.

An algorithm of this kind gives a loss; PPO and A2C are two, and a user's own is a third.
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxroll import estimators, losses
from jaxroll.agents.base import PLAN_FOLD, DistributedAgent, LearnerState, TrainState
from jaxroll.agents.explained import ExplainedVariance
from jaxroll.agents.hyperparameters import leaf, static
from jaxroll.checks import divisors
from jaxroll.learners import (
    Reduction,
    map_actors,
    minibatch_updates,
    sum_actors,
)
from jaxroll.metrics import Last, Mean, Sum
from jaxroll.optimizers import clipped_adam
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
      ...             log_prob, self.advantages(batch), batch.weights)
      ...         return loss, weight, {"loss": Mean(loss, weight)}
      >>> plain = Plain.create("CartPole-v1", num_envs=4, num_steps=8)
      >>> state = jax.eval_shape(plain.init, jax.random.key(0))
      >>> "loss" in jax.eval_shape(plain.train_step, state)[1]
      True
    """

    storage: Any = struct.field(pytree_node=False, default=None)

    gae_lambda: Array = leaf(0.95, "λ of the advantage estimate", "in [0, 1]")
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
        agent = super().create(env, policy=policy, **hyperparameters)
        return agent.replace(storage=storage)

    def _validate(self) -> None:
        super()._validate()
        per_actor = self.envs_per_actor * self.num_steps
        what = f"envs per actor * num_steps = {self.envs_per_actor} * {self.num_steps}"
        length = self.sequence_length or self.num_steps
        if self.num_steps % length:
            raise ValueError(
                f"sequence_length must divide num_steps = {self.num_steps}, got {length}. Use one "
                f"of {divisors(self.num_steps)}."
            )
        if self.network in ("lstm", "gru"):
            per_actor = per_actor // length
            what = f"sequences per actor = {self.envs_per_actor} * {self.num_steps} / {length}"
        elif self.sequence_length is not None and self.policy is None:
            raise ValueError(
                f"sequence_length = {self.sequence_length} is for recurrent policies, got network "
                f'{self.network!r}. Use network="lstm", or leave it out.'
            )
        if per_actor % self.num_mini_batch:
            raise ValueError(
                f"num_mini_batch must divide {what} = {per_actor}, got {self.num_mini_batch}. Use "
                f"one of {divisors(per_actor)}."
            )

    @abc.abstractmethod
    def loss(self, params: PyTree, batch: Minibatch) -> tuple[Array, Array, dict[str, Any]]:
        """(Σ w·ℓ, Σ w, metrics) over one actor's minibatch.

        Args:
          params: of the policy; give them to `self.outputs(params, batch)`.
          batch: leaves [N, ...], or [L, N, ...] sequences for a recurrent policy.

        A loss that only adds up rows (with `self.advantages` for what needs them all) is faster on
        a CPU if it says so: decorate it with `jaxroll.learners.adds_over_rows`.
        """

    def outputs(self, params: PyTree, batch: Minibatch) -> PolicyOutput:
        """What the policy says of the minibatch now, recurrent or not."""
        step = batch.transition
        obs = step.obs
        if step.valid is not None:  # rows of weight 0 may hold anything
            obs = losses.safe_rows(obs, batch.weights)
        if batch.initial_carry is None:
            return self.policy.apply(params, (), obs, step.is_first)[1]
        return self.policy.unroll(params, batch.initial_carry, obs, step.is_first)[1]

    def advantages(self, batch: Minibatch) -> Array:
        """The minibatch's advantages, streams added up, normalised if so chosen."""
        assert batch.targets is not None
        advantages = sum(jax.tree.leaves(batch.targets.advantages))
        if self.normalize_advantage == "minibatch":
            advantages = estimators.normalize(advantages, batch.weights)
        return jnp.asarray(advantages)

    def _with_advantages(self, batch: Minibatch) -> Minibatch:
        assert batch.targets is not None
        return batch.replace(targets=batch.targets.replace(advantages=self.advantages(batch)))

    @property
    def collect_options(self) -> dict[str, Any]:
        """Options of the collector."""
        return {"max_truncations": self.max_truncations, "sequence_length": self.sequence_length}

    # The learner.

    def optimizer(self, learning_rate: Array) -> optax.GradientTransformation:
        """Adam behind a clip of the gradient's norm."""
        return clipped_adam(learning_rate, self.max_grad_norm, epsilon=self.adam_epsilon)

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
            advantages = jnp.asarray(sum(jax.tree.leaves(contents.targets.advantages)))
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
        split_rows = plans.sequence_length is None and getattr(self.loss, "adds_over_rows", False)
        trained, prepare = self, None
        if split_rows:  # a normalisation needs all rows, so it comes before they are split
            trained, prepare = self.replace(normalize_advantage=None), self._with_advantages
        params, opt_state, (metrics, report) = minibatch_updates(
            lambda params, batch: trained.loss(self.with_normalizer(params, learner), batch),
            self.optimizer(self.current_learning_rate(learner)),
            learner.params,
            learner.opt_state,
            storages,
            plans,
            prepare=prepare,
            split_rows=split_rows,
            **across,
        )
        metrics = summed(metrics)
        metrics |= gradient_metrics(report)
        return params, opt_state, metrics, self.num_epochs * self.num_mini_batch


def summed(metrics: PyTree) -> Any:
    """Metrics of all minibatches, [E·M, ...], added up."""
    return jax.tree.map(lambda x: jnp.sum(x, 0, dtype=x.dtype), metrics)


def gradient_metrics(report: dict[str, Array]) -> dict[str, Any]:
    """`grad_norm` and `nonfinite` of all minibatches."""
    return {
        "grad_norm": Mean.of(report["grad_norm"]),
        "nonfinite": Sum(jnp.sum(report["nonfinite"], 0, dtype=jnp.int32)),
    }


def _explained_variance(storage: Any) -> losses.ExplainedVarianceSums:
    contents = storage.contents()
    values = sum(jax.tree.leaves(contents.transition.value))
    returns = sum(jax.tree.leaves(contents.targets.returns))
    return losses.explained_variance_sums(
        jnp.asarray(values), jnp.asarray(returns), contents.weights
    )
