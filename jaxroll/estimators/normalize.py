"""Zero mean and unit spread over the rows that count."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxroll import sums
from jaxroll.checks import check_array
from jaxroll.types import Array


def normalize(
    x: Array,
    weights: Array | None = None,
    *,
    ddof: int = 0,
    eps: float = 1e-8,
    axis_name: str | tuple[str, ...] | None = None,
) -> Array:
    """(x − mean) / (std + eps) over all rows whose weight is not 0; 0 in the others.

    One row, or none, gives zeros rather than NaN. What stands in a row of weight 0 (a NaN, say)
    has no effect.

    Args:
      x: any shape.
      weights: the same shape, bool or float; None: all rows count alike.
      ddof: 0 divides the squares by the number of rows (numpy), 1 by one less (torch).
      eps: added to the standard deviation.
      axis_name: a mesh or vmap axis to pool over; None: these rows only, which does not
        depend on how actors are spread over devices.

    Returns:
      the shape and dtype of x.

    Example:
      >>> normalize(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])).tolist()
      [-1.0, 1.0, 0.0]
    """
    x = jnp.asarray(check_array("x", x))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be floating point, got {x.dtype}. Use x.astype(jnp.float32).")
    # Sums of many rows need more digits than a half-precision result has.
    exact = jnp.promote_types(x.dtype, jnp.float32)
    if weights is None:
        weights = jnp.ones(x.shape, exact)
    weights = jnp.asarray(check_array("weights", weights, x.shape, " of x")).astype(exact)

    def total(y: Array) -> Array:
        y = sums.total(y)
        return y if axis_name is None else jax.lax.psum(y, axis_name)

    counts = weights > 0
    count = total(weights)
    mean = total(jnp.where(counts, x, 0) * weights) / jnp.where(count > 0, count, 1)
    centred = jnp.where(counts, x - mean, 0)
    free = jnp.where(count > ddof, count - ddof, 1)
    variance = total(centred * centred * weights) / free
    # Without spread the divisor is 1, not 0, and the square root keeps its gradient finite.
    spread = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)) + eps, 1)
    # One division, not one for each row; and no quotient that a compiler might reorder.
    return (centred * (1 / spread)).astype(x.dtype)
