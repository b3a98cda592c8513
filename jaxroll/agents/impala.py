"""IMPALA: actors run ahead, the learner corrects for it with V-trace.

Each actor has a ring of unrolls. An iteration adds one unroll of every environment and makes
U = num_envs / batch_size updates from the oldest; `init` fills the rings but for one iteration. So
in the steady state the j-th batch of an iteration is (R − 1)·U + j policy versions behind, with
R = num_storages / num_envs: asynchrony that can be repeated bit by bit.

The learner values final and last observations under its own params, and its losses are sums over
time and batch (Espeholt et al., 2018).

Defaults: RMSprop with its ε and decay, the gradient's norm of 40 and the value's weight are the
paper's, which clips rewards to ±1. Unscaled returns drown its entropy bonus of 0.01: with 0.1 and
a step size of 2e-3, all of 10 seeds solved CartPole-v1 within 250 k steps (with 0.01, 7 of 10).
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxroll import estimators, losses
from jaxroll.agents.base import DistributedAgent
from jaxroll.agents.hyperparameters import leaf, static
from jaxroll.agents.shared import ExplainedVariance, clear_rows
from jaxroll.agents.states import LearnerState, TrainState
from jaxroll.checks import check_divides
from jaxroll.envs import time_limit
from jaxroll.learner import (
    Reduction,
    apply_gradient,
    gradient,
    map_actors,
    nonfinite_leaves,
)
from jaxroll.metrics import Last, Mean, Sum
from jaxroll.storages import DistributedStorage, Unrolls
from jaxroll.types import ActorState, Array, PyTree, Rollout
from jaxroll.varying import replicate


class IMPALA(DistributedAgent):
    """IMPALA: V-trace on unrolls that older policies collected.

        ℓ = Σ [ −A log π(a) + c_v ½ (v_s − V)² − c_H H(π) ]

    Example:
      >>> import jaxroll
      >>> impala = jaxroll.IMPALA.create("CartPole-v1", num_envs=8, num_steps=4, num_storages=16,
      ...                                batch_size=4)
      >>> state = jax.eval_shape(impala.init, jax.random.key(0))  # shapes only: compiles nothing
      >>> state, metrics = jax.eval_shape(impala.train_step, state)
      >>> impala.updates_per_iteration, "policy_lag" in metrics
      (2, True)

    Espeholt et al., 2018, https://arxiv.org/abs/1802.01561
    """

    name: ClassVar[str] = "impala"

    num_envs: int = static(16, "environments in total, over all actors", ">= 1")
    num_steps: int = static(20, "steps of an unroll", ">= 1")
    num_storages: int = static(
        32, "ring slots in total; more than num_envs: actors run ahead", ">= 1"
    )
    batch_size: int = static(8, "unrolls of one update", ">= 1")
    learning_rate: Array = leaf(2e-3, "step size of the optimiser", "> 0")
    max_grad_norm: Array = leaf(
        40.0, "the gradient's norm is clipped to this; none: not at all", "> 0", none=float("inf")
    )
    rmsprop_decay: Array = leaf(0.99, "decay of RMSprop's squares", "in [0, 1]")
    rmsprop_epsilon: Array = leaf(0.01, "ε of RMSprop", "> 0")
    value_coef: Array = leaf(0.5, "weight of the value loss", ">= 0")
    entropy_coef: Array = leaf(0.1, "weight of the entropy bonus", ">= 0")
    clip_rho: Array = leaf(1.0, "ρ̄ of V-trace; none: no bound", "> 0", none=float("inf"))
    clip_c: Array = leaf(1.0, "c̄ of V-trace; none: no bound", "> 0", none=float("inf"))
    clip_pg_rho: Array = leaf(
        1.0, "ρ̄ of the policy gradient; none: no bound", "> 0", none=float("inf")
    )
    trace_lambda: Array = leaf(1.0, "λ of V-trace", "in [0, 1]")

    def _validate(self) -> None:
        super()._validate()
        check_divides("batch_size", self.batch_size, self.num_envs, "num_envs")
        check_divides("num_envs", self.num_envs, self.num_storages, "num_storages")
        check_divides("num_actors", self.num_actors, self.batch_size, "batch_size")
        if self.normalize_rewards and self.num_storages > self.num_envs:
            raise ValueError(
                "normalize_rewards scales rewards when they are collected, with the spread known "
                "then; unrolls that wait in the ring would mix scales. Use num_storages = "
                f"num_envs = {self.num_envs}, or normalize_rewards=False."
            )

    # Sizes.

    @property
    def num_prefills(self) -> int:
        """R − 1: iterations that wait in the ring."""
        return self.num_storages // self.num_envs - 1

    @property
    def updates_per_iteration(self) -> int:
        """U, the optimiser steps of one iteration."""
        return self.num_envs // self.batch_size

    @property
    def collect_options(self) -> dict[str, Any]:
        """The learner values final observations itself: as many as a time limit allows.

        Where no limit is known it values the first of an unroll, the actor the others.
        """
        unknown = self.max_truncations is None and time_limit(self.env) is None
        return {"max_truncations": self.max_truncations, "bootstrap": unknown}

    # The ring.

    def assemble(
        self, learner: LearnerState, actors: ActorState, rollouts: Any = None
    ) -> TrainState:
        """Give every actor an empty ring."""
        if rollouts is None:
            rollouts = jax.eval_shape(lambda: jax.vmap(lambda a: self.run(learner, a))(actors)[1])

        def storage(_: Any) -> DistributedStorage:
            step = jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), rollouts.transition)
            carry = jax.tree.map(lambda x: jnp.zeros(x.shape[2:], x.dtype), rollouts.initial_carry)
            return DistributedStorage.create(
                step,
                self.num_steps,
                num_storages=self.num_storages // self.num_actors,
                batch_size=self.batch_size // self.num_actors,
                initial_carry=carry,
                max_truncations=rollouts.final.step.shape[1],
            )

        count = actors.is_first.shape[0]  # on a mesh, those of this device
        slots = jax.vmap(lambda a: storage(a).slots)(jnp.arange(count))
        ring = jax.tree.map(jnp.asarray, storage(0)).replace(slots=slots)
        return TrainState(learner=learner, actors=actors, storage=ring)

    def state_specs(self, axis_name: str) -> Any:
        """As for every agent; the ring's slots are spread, its counters are on every device."""
        everywhere: Any = PartitionSpec()
        spread: Any = PartitionSpec(axis_name)
        ring = DistributedStorage(
            slots=spread,
            counters_=everywhere,
            num_envs=self.envs_per_actor,
            batch_size=self.batch_size // self.num_actors,
        )
        return super().state_specs(axis_name).replace(storage=ring)

    def store(
        self,
        state: TrainState,
        rollouts: Rollout,
        *,
        axis_name: Any = None,
        reduction: Reduction = "exact",
    ) -> TrainState:
        """Write one rollout of every actor into its ring."""
        ring = state.storage

        def add(slots: Unrolls, rollout: Rollout) -> tuple[Unrolls, Any]:
            assert rollout.final is not None
            # Counters have no actor axis: a batched position would turn a slice into a scatter.
            after = ring.replace(slots=slots).add(
                rollout.transition,
                rollout.last_obs,
                jax.tree.map(lambda x: x[0], rollout.initial_carry),
                state.learner.version,
                last_is_first=rollout.last_is_first,
                final_obs=rollout.final.obs,
                final_step=rollout.final.step,
            )
            return after.slots, after.counters_

        slots, counters = map_actors(add, ring.slots, rollouts, reduction=reduction)
        # All actors' rings move in step, those of other devices too.
        counters = replicate(jax.tree.map(lambda x: x[0], counters), axis_name)
        return state.replace(storage=ring.replace(slots=slots, counters_=counters))

    # The learner.

    def optimizer(self, learning_rate: Array) -> optax.GradientTransformation:
        """RMSprop behind a clip of the gradient's norm."""
        return optax.flatten(  # one vector: a dozen small leaves cost more than their work
            optax.chain(
                optax.clip_by_global_norm(self.max_grad_norm),
                optax.rmsprop(learning_rate, decay=self.rmsprop_decay, eps=self.rmsprop_epsilon),
            )
        )

    def init_optimizer(self, params: PyTree) -> PyTree:
        """RMSprop's squares at zero."""
        return self.optimizer(self.learning_rate).init(params)

    def loss(self, params: PyTree, batch: Unrolls) -> tuple[Array, Array, dict[str, Any]]:
        """(Σ ℓ, Σ w, metrics) of one actor's unrolls."""
        step = batch.transition
        shape = step.terminated.shape
        weights = jnp.broadcast_to(batch.weights[None], shape)
        if step.valid is not None:
            weights = jnp.where(step.valid, weights, 0)
            step = clear_rows(step, weights)
            batch = batch.replace(transition=step)
        output, last_values, bootstrap_values = self.values(params, batch)
        log_prob = output.distribution.log_prob(step.action)
        targets = jax.lax.stop_gradient(
            estimators.vtrace(
                log_prob - step.log_prob,
                step.reward,
                output.value,
                last_values,
                step.terminated,
                step.truncated,
                bootstrap_values,
                self.discount,
                clip_rho=self.clip_rho,
                clip_c=self.clip_c,
                clip_pg_rho=self.clip_pg_rho,
                trace_lambda=self.trace_lambda,
                valid=step.valid,
            )
        )
        policy_loss, weight = losses.policy_gradient_loss(log_prob, targets.advantages, weights)
        value_loss, _ = losses.value_loss(output.value, targets.returns, weights)
        entropy, _ = losses.entropy_bonus(output.distribution.entropy(), weights)
        total = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        kl, _ = losses.approximate_kl(log_prob, step.log_prob, weights)
        clipped = log_prob - step.log_prob > jnp.log(self.clip_rho)
        sums = {
            "loss": total,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": kl,
            "clip_fraction": losses.weighted_sum(clipped.astype(jnp.float32), weights)[0],
        }
        explained = losses.explained_variance_sums(output.value, targets.returns, weights)
        metrics = {name: Mean(x, weight) for name, x in sums.items()}
        return total, weight, metrics | {"explained_variance": ExplainedVariance(explained)}

    def values(self, params: PyTree, batch: Unrolls) -> tuple[Any, Array, Array]:
        """(outputs [T, b], V(last observation) [b], V(final observation) [T, b]).

        Final observations are valued with the carry that the learner has at their step; where one
        is not in the slot, the actor's `bootstrap_value` is taken.
        """
        step, policy = batch.transition, self.policy
        obs, is_first = step.obs, step.is_first
        frozen = jax.lax.stop_gradient(params)
        num_steps, size = step.terminated.shape
        rows = batch.final_step.shape[0]
        recurrent = bool(jax.tree.leaves(batch.initial_carry))
        if recurrent and rows:

            def one(carry: PyTree, row: Any) -> tuple[PyTree, Any]:
                carry, output = policy.apply(params, carry, *row)
                return carry, (output, jax.lax.stop_gradient(carry))

            carry, (output, carries) = jax.lax.scan(one, batch.initial_carry, (obs, is_first))
            at = jnp.minimum(batch.final_step, num_steps - 1)
            env = jnp.broadcast_to(jnp.arange(size)[None], at.shape)
            final_carry = jax.tree.map(lambda x: x[at, env].reshape(-1, *x.shape[2:]), carries)
        else:
            carry, output = policy.unroll(params, batch.initial_carry, obs, is_first)
            final_carry = ()
        carry = jax.lax.stop_gradient(carry)
        last_values = policy.value(frozen, carry, batch.last_obs, batch.last_is_first)
        bootstrap_values = step.bootstrap_value
        if rows:
            final_obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch.final_obs)
            values = policy.value(frozen, final_carry, final_obs, jnp.zeros(rows * size, bool))
            index = (batch.final_step, jnp.broadcast_to(jnp.arange(size)[None], (rows, size)))
            bootstrap_values = bootstrap_values.at[index].set(
                values.reshape(rows, size), mode="drop"
            )
        return output, last_values, bootstrap_values

    def update(
        self,
        state: TrainState,
        rollouts: Rollout,
        *,
        axis_name: Any = None,
        reduction: Reduction = "fast",
    ) -> tuple[TrainState, dict[str, Any]]:
        """Store the rollouts, then U updates from the oldest unrolls."""
        across = {"axis_name": axis_name, "reduction": reduction}
        before, dropped = state.learner, state.storage.dropped
        learner, actors, rollouts = self.update_normalizers(
            before, state.actors, rollouts, **across
        )
        state = self.store(state.replace(actors=actors), rollouts, **across)
        ring = state.storage
        optimizer = self.optimizer(self.current_learning_rate(learner))

        def one(carry: Any, _: Any) -> tuple[Any, Any]:
            params, opt_state, counters, version = carry
            batches = jax.vmap(
                lambda slots: ring.replace(slots=slots, counters_=counters).sample()
            )(ring.slots)
            lag = replicate(version - batches.version[0], axis_name)
            # Statistics as they were when the newest rollout was collected.
            grads, metrics = gradient(
                lambda params, batch: self.loss(self.with_normalizer(params, before), batch),
                params,
                batches,
                mean=False,
                **across,
            )
            params, opt_state, norm = apply_gradient(optimizer, params, opt_state, grads)
            first = jax.tree.map(lambda x: x[0], ring.slots)
            counters = ring.replace(slots=first, counters_=counters).update().counters_
            metrics["policy_lag"] = Mean.of(lag.astype(jnp.float32))
            metrics["grad_norm"] = Mean.of(jnp.where(jnp.isfinite(norm), norm, 0))
            metrics["nonfinite"] = Sum(nonfinite_leaves(grads))
            return (params, opt_state, counters, version + 1), metrics

        carry = (learner.params, learner.opt_state, ring.counters_, learner.version)
        (params, opt_state, counters, _), metrics = jax.lax.scan(
            one, carry, length=self.updates_per_iteration
        )
        metrics = jax.tree.map(lambda x: jnp.sum(x, 0, dtype=x.dtype), metrics)
        metrics |= self.episode_metrics(rollouts, **across)
        metrics["storage_dropped"] = Sum(counters.dropped - dropped)
        metrics["learning_rate"] = Last.of(self.current_learning_rate(before))
        learner = learner.replace(params=params, opt_state=opt_state)
        learner = self.advance_counters(
            learner, self.updates_per_iteration, metrics["episodes"].total
        )
        return state.replace(learner=learner, storage=ring.replace(counters_=counters)), metrics
