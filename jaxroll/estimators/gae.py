"""Generalized advantage estimation, and the λ-return that belongs to it.

Arrays are time-major, [T, B]. A rollout need not start or end with an episode: `terminated`
stops the bootstrap, `truncated` stops only the trace.
"""

from __future__ import annotations

from jaxroll.estimators.bootstrap import (
    Steps,
    check_steps,
    discounted_cumsum,
    next_values,
    td_errors,
)
from jaxroll.types import Array, Targets


def gae(
    rewards: Array,
    values: Array,
    last_values: Array,
    terminated: Array | None,
    truncated: Array | None,
    bootstrap_values: Array | None,
    discount: Array | float,
    gae_lambda: Array | float,
    *,
    valid: Array | None = None,
) -> Targets:
    """Advantage of each action, looking ahead with exponentially fading trust.

        δₜ = rₜ + γ vₜ₊₁ − vₜ
        Aₜ = δₜ + γ λ Aₜ₊₁

    At an end vₜ₊₁ is 0 (terminated) or V(final observation) (truncated), and Aₜ₊₁ is 0.

    Args:
      rewards: [T, B] reward received after acting at step t.
      values: [T, B] V(obs[t]); its dtype is the result's.
      last_values: [B] value of the observation after the last step.
      terminated: [T, B] the episode ended by itself: its successor is worth 0.
      truncated: [T, B] the episode was cut short; None if none ever is.
      bootstrap_values: [T, B] V(final observation), read only where truncated.
      discount: γ, a scalar or [T, B].
      gae_lambda: λ, a scalar or [T, B]; λₜ weighs what follows step t.
      valid: [T, B] False where a row is not experience: advantage 0, return = its value, and
        a row before it that has not ended bootstraps from its value.

    Returns:
      Targets with [T, B] advantages and [T, B] returns = advantages + values.

    Example:
      >>> import jax.numpy as jnp
      >>> ones, zeros = jnp.ones((3, 1)), jnp.zeros((3, 1))
      >>> gae(ones, zeros, jnp.zeros(1), zeros > 0, None, None, 0.5, 1.0).returns[:, 0].tolist()
      [1.75, 1.5, 1.0]

    Schulman et al., 2016, https://arxiv.org/abs/1506.02438
    """
    steps = check_steps(
        rewards, values, last_values, terminated, truncated, bootstrap_values, valid
    )
    return _targets(steps, discount, steps.number("gae_lambda", gae_lambda))


def lambda_returns(
    rewards: Array,
    values: Array,
    last_values: Array,
    terminated: Array | None,
    truncated: Array | None,
    bootstrap_values: Array | None,
    discount: Array | float,
    trace_lambda: Array | float,
    *,
    valid: Array | None = None,
) -> Array:
    """λ-return of each step: the mixture of all n-step returns.

        Gₜ = rₜ + γ [(1 − λ) vₜ₊₁ + λ Gₜ₊₁]

    which is the advantage of `gae` plus the value. Arguments as in `gae`.

    Returns:
      [T, B] returns.

    Example:
      >>> import jax.numpy as jnp
      >>> r, v = jnp.ones((2, 1)), jnp.full((2, 1), 10.0)
      >>> lambda_returns(r, v, jnp.full(1, 10.0), None, None, None, 0.5, 0.0)[:, 0].tolist()
      [6.0, 6.0]

    Sutton and Barto, 2018, section 12.1
    """
    steps = check_steps(
        rewards, values, last_values, terminated, truncated, bootstrap_values, valid
    )
    return _targets(steps, discount, steps.number("trace_lambda", trace_lambda)).returns


def _targets(steps: Steps, discount: Array | float, trace_lambda: Array) -> Targets:
    discount = steps.number("discount", discount)
    following, continues = next_values(steps)
    errors = td_errors(steps, discount, following)
    advantages = discounted_cumsum(errors, discount * trace_lambda, continues)
    return Targets(advantages, advantages + steps.values)
