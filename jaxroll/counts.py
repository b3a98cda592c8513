"""Counters that do not wrap: [2] uint32, the low and the high 32 bits of one number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.types import Array


def count_zero() -> jax.Array:
    """[2] uint32: a counter at 0."""
    return jnp.zeros(2, jnp.uint32)


def count_add(count: Array, number: Array | int) -> jax.Array:
    """The counter after `number` more, an integer in [0, 2**32).

    Example:
      >>> count = count_add(count_add(count_zero(), 2**32 - 1), 5)
      >>> count.tolist(), count_value(count)
      ([4, 1], 4294967300)
    """
    number = jnp.asarray(number, jnp.uint32)
    low = count[0] + number
    return jnp.stack([low, count[1] + (low < number).astype(jnp.uint32)])


def count_value(count: Array) -> int | list[int]:
    """The counter as a Python integer; of [..., 2] counters, a nested list of them."""
    low, high = np.moveaxis(np.asarray(count).astype(np.int64), -1, 0)
    return (high * 2**32 + low).tolist()


def count_float(count: Array) -> jax.Array:
    """[] float32: about the counter's value, inside jit."""
    count = count.astype(jnp.float32)
    return count[1] * 2.0**32 + count[0]
