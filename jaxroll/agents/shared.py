"""Parts of an update that algorithms share: normalisers, episodes, rows that are not valid."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import losses
from jaxroll.agents.states import LearnerState
from jaxroll.learner import Reduction, gather_actors, map_actors, sum_actors
from jaxroll.metrics import Mean, Metric, Sum
from jaxroll.normalizers import RunningStatistics, discounted_sums
from jaxroll.types import ActorState, Array, Rollout, Transition


def update_normalizers(
    agent: Any,
    learner: LearnerState,
    actors: ActorState,
    rollouts: Rollout,
    *,
    axis_name: Any,
    reduction: Reduction,
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
        params = agent.acting_params(learner)
        stacked = map_actors(
            lambda step: agent.policy.batch_statistics(params, step.obs, _valid_weights(step)),
            transition,
            reduction=reduction,
        )
        learner = learner.replace(obs_statistics=merged(learner.obs_statistics, stacked))
    if learner.reward_scaler is not None:
        scaler = learner.reward_scaler

        def sums_of(before: Array, step: Any) -> tuple[Array, RunningStatistics]:
            sums, after = discounted_sums(
                step.reward, step.terminated, step.truncated, before, agent.discount
            )
            return after, scaler.statistics.batch_statistics(sums, _valid_weights(step))

        sums, stacked = map_actors(sums_of, actors.reward_sums, transition, reduction=reduction)
        scaled = transition.replace(reward=scaler.scale(transition.reward))
        rollouts = rollouts.replace(transition=scaled)
        scaler = scaler.replace(statistics=merged(scaler.statistics, stacked))
        learner = learner.replace(reward_scaler=scaler)
        actors = actors.replace(reward_sums=sums)
    return learner, actors, rollouts


def episode_metrics(rollouts: Rollout, *, axis_name: Any, reduction: Reduction) -> dict[str, Any]:
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


def clear_rows(transition: Transition, weights: Array) -> Transition:
    """Zeros in rows of weight 0, flags and masks apart: such rows may hold anything, NaN too."""

    def clear(x: Array) -> Array:
        return x if x.dtype == bool else losses.safe_rows(x, weights)

    return jax.tree.map(clear, transition)


def _valid_weights(transition: Any) -> Array:
    if transition.valid is not None:
        return transition.valid.astype(jnp.float32)
    return jnp.ones(transition.terminated.shape, jnp.float32)


class ExplainedVariance(Metric):
    """1 − Var(returns − values) / Var(returns), of all rows that were merged."""

    sums: losses.ExplainedVarianceSums

    def result(self) -> np.ndarray:
        """The number; NaN where the returns do not vary."""
        with np.errstate(divide="ignore", invalid="ignore"):
            s = jax.tree.map(lambda x: np.asarray(x, np.float64), self.sums)
            spread = s.returns_squared / s.weight - (s.returns / s.weight) ** 2
            left = s.errors_squared / s.weight - (s.errors / s.weight) ** 2
            return np.where(spread > 0, 1 - left / spread, np.nan)
