"""Retrace: off-policy returns for action values.

Arrays are time-major, [T, B]; ends are as in `jaxroll.estimators.bootstrap`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxroll.estimators.bootstrap import (
    check_steps,
    discounted_cumsum,
    next_values,
    shift,
    td_errors,
)
from jaxroll.types import Array


def retrace(
    log_rhos: Array,
    rewards: Array,
    q_values: Array,
    expected_values: Array,
    last_values: Array,
    terminated: Array | None,
    truncated: Array | None,
    bootstrap_values: Array | None,
    discount: Array | float,
    *,
    trace_lambda: Array | float = 1.0,
    valid: Array | None = None,
) -> jax.Array:
    """Targets for Q(obs[t], action[t]) that are safe however far the policies are apart.

        Gₜ = rₜ + γ [Vₜ₊₁ + λ min(1, ρₜ₊₁) (Gₜ₊₁ − Qₜ₊₁)]

    Args:
      log_rhos: [T, B] log π(aₜ) − log μ(aₜ).
      q_values: [T, B] Q of the action that was taken.
      expected_values: [T, B] Vₜ, the learner's mean of Q over actions; its dtype is the result's.
      last_values: [B] the same of the observation after the last step.
      rewards, terminated, truncated, bootstrap_values, discount: as in `jaxroll.gae`.
      trace_lambda: λ, a scalar or [T, B]; λₜ weighs what follows step t.
      valid: [T, B] False where a row is not experience: its return is its Q, and a row before
        it that has not ended bootstraps from its expected value.

    Returns:
      [T, B] returns.

    Example:
      >>> r, q = jnp.ones((2, 1)), jnp.zeros((2, 1))
      >>> retrace(q, r, q, q, jnp.zeros(1), None, None, None, 0.5)[:, 0].tolist()
      [1.5, 1.0]

    Munos et al., 2016, https://arxiv.org/abs/1606.02647
    """
    ends = (terminated, truncated, bootstrap_values)
    steps = check_steps(rewards, expected_values, last_values, *ends, valid, name="expected_values")
    q_values, log_rhos = steps.array("q_values", q_values), steps.array("log_rhos", log_rhos)
    discount = steps.number("discount", discount)
    decay = discount * steps.number("trace_lambda", trace_lambda)

    following, continues = next_values(steps)
    errors = td_errors(steps._replace(values=q_values), discount, following)
    log_rhos = steps.where_valid(log_rhos)
    ratios = jnp.exp(jnp.minimum(log_rhos, 0))
    decay = decay * shift(ratios, jnp.zeros_like(ratios[-1]))
    return q_values + discounted_cumsum(errors, decay, continues)
