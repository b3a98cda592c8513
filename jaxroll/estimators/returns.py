"""Returns without a trace parameter: n-step and discounted.

Arrays are time-major, [T, B]; ends are as in `jaxroll.estimators.discounts`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxroll.estimators import discounts
from jaxroll.estimators.gae import lambda_returns
from jaxroll.types import Array


def n_step_returns(
    rewards: Array,
    values: Array,
    last_values: Array,
    terminated: Array | None,
    truncated: Array | None,
    bootstrap_values: Array | None,
    discount: Array | float,
    *,
    n: int,
    valid: Array | None = None,
) -> Array:
    """The rewards of the next n steps and the value that stands behind them.

        Gₜ = rₜ + γ rₜ₊₁ + … + γⁿ⁻¹ rₜ₊ₙ₋₁ + γⁿ vₜ₊ₙ

    by n sweeps of Gᵏₜ = rₜ + γ Gᵏ⁻¹ₜ₊₁ from G⁰ = v. Fewer steps are summed where an episode or
    the rollout ends before; the value is then V(final observation), 0 or `last_values`.

    Args:
      rewards: [T, B].
      values: [T, B] V(obs[t]).
      last_values: [B] value of the observation after the last step.
      terminated: [T, B] the successor is worth 0.
      truncated: [T, B] or None.
      bootstrap_values: [T, B] V(final observation), read only where truncated.
      discount: γ, a scalar or [T, B].
      n: how many rewards, at least 1; static.
      valid: [T, B] False where a row is no experience: its return is its value.

    Returns:
      [T, B] returns.

    Example:
      >>> r, v = jnp.ones((3, 1)), jnp.full((3, 1), 8.0)
      >>> n_step_returns(r, v, jnp.full(1, 4.0), None, None, None, 0.5, n=2)[:, 0].tolist()
      [3.5, 2.5, 3.0]
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(
            f"n must be a whole number of steps, at least 1, got {n!r}. Use n=1 for one-step "
            "targets, or lambda_returns for a mixture of all n."
        )
    x = discounts.prepare(
        rewards=rewards,
        values=values,
        last_values=last_values,
        terminated=terminated,
        truncated=truncated,
        bootstrap_values=bootstrap_values,
        valid=valid,
        numbers={"discount": discount},
    )

    if n >= x.rewards.shape[0]:  # every sum runs to an end: one walk instead of T sweeps
        return lambda_returns(
            rewards,
            values,
            last_values,
            terminated,
            truncated,
            bootstrap_values,
            discount,
            1.0,
            valid=valid,
        )

    def sweep(_: Any, returns: Array) -> Array:
        onward = jnp.concatenate([returns[1:], x.last_values[None]])
        return discounts.only_valid(
            x.valid, x.rewards + x.discount * discounts.after(onward, x), x.values
        )

    return jax.lax.fori_loop(0, n, sweep, x.values)


def discounted_returns(
    rewards: Array,
    last_values: Array,
    terminated: Array | None,
    truncated: Array | None,
    bootstrap_values: Array | None,
    discount: Array | float,
    *,
    valid: Array | None = None,
    unroll: int = 1,
) -> Array:
    """Sum of all rewards to come, each discounted by its distance.

        Gₜ = rₜ + γ Gₜ₊₁

    with `last_values` after the last step (zeros: only what was collected counts).

    Args:
      rewards: [T, B].
      last_values: [B] what stands after the last step; its dtype is the result's.
      terminated: [T, B] nothing comes after this step.
      truncated: [T, B] or None.
      bootstrap_values: [T, B] V(final observation), read only where truncated.
      discount: γ, a scalar or [T, B].
      valid: [T, B] False where a row is no experience. There are no values here that could
        stand in for it, so it is passed over, as if it were not there; its own return is 0.
      unroll: of the scan; 1 is fastest on CPU.

    Returns:
      [T, B] returns.

    Example:
      >>> discounted_returns(jnp.ones((3, 1)), jnp.zeros(1), None, None, None, 0.5)[:, 0].tolist()
      [1.75, 1.5, 1.0]
    """
    x = discounts.prepare(
        rewards=rewards,
        last_values=last_values,
        terminated=terminated,
        truncated=truncated,
        bootstrap_values=bootstrap_values,
        valid=valid,
        numbers={"discount": discount},
    )

    def step(onward: Array, row: Any) -> tuple[Array, Array]:
        value = row.rewards + row.discount * discounts.after(onward, row)
        return (
            discounts.only_valid(row.valid, value, onward),
            discounts.only_valid(row.valid, value, jnp.zeros_like(value)),
        )

    return discounts.backward(
        step,
        x.last_values,
        unroll=unroll,
        rewards=x.rewards,
        terminated=x.terminated,
        truncated=x.truncated,
        bootstrap_values=x.bootstrap_values,
        discount=x.discount,
        valid=x.valid,
    )
