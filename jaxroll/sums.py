"""Sums to a scalar in an order that the compiler cannot choose."""

from __future__ import annotations

import jax.numpy as jnp

from jaxroll.types import Array

LANES = 16


def total(x: Array) -> Array:
    """Sum of all entries, always in the same order.

    A compiler is free to add a whole array up in any order, and chooses by what stands around
    it: another one on one device than on eight. Here rows of 16 numbers are added entry by entry
    (nothing to choose), then the 16 in halves. It is as fast, and more accurate than one running
    sum.

    Args:
      x: any shape.

    Returns:
      [], the dtype of x.

    Example:
      >>> float(total(jnp.arange(100.0)))
      4950.0
    """
    flat = jnp.ravel(x)
    flat = jnp.pad(flat, (0, -flat.size % LANES))
    lanes = jnp.sum(flat.reshape(-1, LANES), axis=0, dtype=flat.dtype)
    while lanes.size > 1:
        half = lanes.size // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]
