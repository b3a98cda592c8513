"""Retrace: off-policy returns for action values.

Arrays are time-major, [T, B]; ends are as in `jaxroll.estimators.discounts`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxroll.estimators import discounts
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
    unroll: int = 1,
) -> Array:
    """Targets for Q(obs[t], action[t]) that are safe however far the policies are apart.

        Gₜ = rₜ + γ [Vₜ₊₁ + λ min(1, ρₜ₊₁) (Gₜ₊₁ − Qₜ₊₁)]

    Args:
      log_rhos: [T, B] log π(aₜ) − log μ(aₜ).
      rewards: [T, B].
      q_values: [T, B] Q of the action that was taken; its dtype is the result's.
      expected_values: [T, B] Vₜ, the mean of Q over the learner's policy.
      last_values: [B] the same of the observation after the last step.
      terminated: [T, B] the successor is worth 0.
      truncated: [T, B] or None.
      bootstrap_values: [T, B] V(final observation), read only where truncated.
      discount: γ, a scalar or [T, B].
      trace_lambda: λ, a scalar or [T, B]; λₜ weighs what follows step t.
      valid: [T, B] False where a row is no experience: its return is its Q, and a row before
        it that has not ended bootstraps from its expected value.
      unroll: of the scan; 1 is fastest on CPU.

    Returns:
      [T, B] returns.

    Example:
      >>> r, q = jnp.ones((2, 1)), jnp.zeros((2, 1))
      >>> retrace(q, r, q, q, jnp.zeros(1), None, None, None, 0.5)[:, 0].tolist()
      [1.5, 1.0]

    Munos et al., 2016, https://arxiv.org/abs/1606.02647
    """
    x = discounts.prepare(
        rewards=rewards,
        q_values=q_values,
        expected_values=expected_values,
        log_rhos=log_rhos,
        last_values=last_values,
        terminated=terminated,
        truncated=truncated,
        bootstrap_values=bootstrap_values,
        valid=valid,
        numbers={"discount": discount, "trace_lambda": trace_lambda},
    )

    def step(onward: Array, row: Any) -> tuple[Array, Array]:
        target = row.rewards + row.discount * discounts.after(onward, row)
        surprise = discounts.only_valid(
            row.valid, target - row.q_values, jnp.zeros_like(row.q_values)
        )
        log_rho = discounts.only_valid(row.valid, row.log_rhos, jnp.zeros_like(row.log_rhos))
        weight = row.trace * jnp.exp(jnp.minimum(0.0, log_rho))
        return row.expected_values + weight * surprise, row.q_values + surprise

    return discounts.backward(
        step,
        x.last_values,
        unroll=unroll,
        log_rhos=x.log_rhos,
        rewards=x.rewards,
        q_values=x.q_values,
        expected_values=x.expected_values,
        terminated=x.terminated,
        truncated=x.truncated,
        bootstrap_values=x.bootstrap_values,
        discount=x.discount,
        trace=discounts.one_earlier(x.trace_lambda),
        valid=x.valid,
    )
