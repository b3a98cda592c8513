"""Returns without a trace parameter: n-step and discounted.

Arrays are time-major, [T, B]; ends are as in `jaxroll.estimators.bootstrap`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxroll.checks import check_count
from jaxroll.estimators.bootstrap import Element, check_steps, discounted_cumsum, join, next_values
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
) -> jax.Array:
    """The rewards of the next n steps and the value of the state that they lead to.

        Gₜ = rₜ + γ rₜ₊₁ + … + γⁿ⁻¹ rₜ₊ₙ₋₁ + γⁿ vₜ₊ₙ

    Fewer steps are summed where an episode or the rollout ends before; the value is then
    V(final observation), 0 or `last_values`.

    Args:
      rewards, values, last_values, terminated, truncated, bootstrap_values, discount: as in
        `jaxroll.gae`.
      n: how many rewards, at least 1; static.
      valid: [T, B] False where a row is not experience: its return is its value.

    Returns:
      [T, B] returns.

    Example:
      >>> r, v = jnp.ones((3, 1)), jnp.full((3, 1), 8.0)
      >>> n_step_returns(r, v, jnp.full(1, 4.0), None, None, None, 0.5, n=2)[:, 0].tolist()
      [3.5, 2.5, 3.0]
    """
    n = check_count("n", n)
    steps = check_steps(
        rewards, values, last_values, terminated, truncated, bootstrap_values, valid
    )
    discount = steps.number("discount", discount)
    following, continues = next_values(steps)
    continues = continues.at[-1].set(False)  # last_values is in `following`
    one_step = steps.rewards + discount * jnp.where(continues, 0, following)
    one_step = steps.where_valid(one_step, steps.values)
    if n >= one_step.shape[0]:
        return discounted_cumsum(one_step, discount, continues)

    # n steps are joined from stretches of 1, 2, 4, … steps. What is shifted in from the start of
    # the rollout never counts, since a stretch that reaches the last row is cut there.
    def later(stretch: Element, by: int) -> Element:
        decay, total, continues = (jnp.roll(x, -by, axis=0) for x in stretch)
        return decay, total, continues

    stretch: Element = (jnp.broadcast_to(discount, one_step.shape), one_step, continues)
    total: Element = (jnp.ones_like(one_step), jnp.zeros_like(one_step), jnp.ones_like(continues))
    summed, size = 0, 1
    while summed < n:
        if n & size:
            total, summed = join(total, later(stretch, summed)), summed + size
        stretch, size = join(stretch, later(stretch, size)), size * 2
    decay, returns, continues = total
    return returns + decay * jnp.where(continues, jnp.roll(steps.values, -n, axis=0), 0)


def discounted_returns(
    rewards: Array,
    last_values: Array,
    terminated: Array | None,
    truncated: Array | None,
    bootstrap_values: Array | None,
    discount: Array | float,
    *,
    valid: Array | None = None,
) -> jax.Array:
    """Sum of all rewards to come, each discounted by its distance.

        Gₜ = rₜ + γ Gₜ₊₁

    with `last_values` after the last step (zeros: only what was collected counts).

    Args:
      rewards, terminated, truncated, bootstrap_values, discount: as in `jaxroll.gae`.
      last_values: [B] value of the observation after the last step; its dtype is the result's.
      valid: [T, B] False where a row is not experience. Without values to bootstrap from, such
        a row is skipped, as if it were not there; its own return is 0.

    Returns:
      [T, B] returns.

    Example:
      >>> discounted_returns(jnp.ones((3, 1)), jnp.zeros(1), None, None, None, 0.5)[:, 0].tolist()
      [1.75, 1.5, 1.0]
    """
    ends = (terminated, truncated, bootstrap_values)
    steps = check_steps(rewards, None, last_values, *ends, valid, name=None)
    discount = steps.number("discount", discount)
    following, continues = next_values(steps)  # 0 where the next row's return is added instead
    x = steps.rewards + discount * following
    if steps.valid is None:
        return discounted_cumsum(x, discount, continues)
    x = jnp.where(steps.valid, x, 0)
    x = x.at[-1].set(jnp.where(steps.valid[-1], x[-1], steps.last_values))
    decay = jnp.where(steps.valid, discount, 1)
    returns = discounted_cumsum(x, decay, continues | ~steps.valid)
    return jnp.where(steps.valid, returns, 0)
