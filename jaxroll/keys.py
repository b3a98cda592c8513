"""JAX's own random bits, computed for all rows at once.

On a CPU JAX computes Threefry as a loop over its rounds, several operations and a turn of the loop
for each. For a rollout's many small draws that loop is most of the time. Here the rounds are
written out, so that a draw is one pass over its rows. The bits are the same (where JAX's
`jax_threefry_partitionable` is on, as it is by default), so nothing changes but the time.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl

from jaxroll.types import Array, PyTree

# Salmon et al., 2011: how far each round rotates, in two groups that take turns.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_JAX_OWN = "threefry2x32"


def unrolled(key: jax.Array) -> jax.Array:
    """The same key, with draws that are one pass over their rows.

    Args:
      key: a typed key, or an array of them; any but Threefry's is returned as it is.

    Example:
      >>> key = jax.random.key(0)
      >>> bool((jax.random.bits(unrolled(key), (3,)) == jax.random.bits(key, (3,))).all())
      True
    """
    if jax.random.key_impl(key) != _JAX_OWN:
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_UNROLLED)


def as_given(tree: PyTree) -> PyTree:
    """A tree that was drawn from an `unrolled` key, with the keys in it as JAX has them.

    Example:
      >>> keys = as_given(jax.random.split(unrolled(jax.random.key(0))))
      >>> keys.dtype == jax.random.key(0).dtype
      True
    """

    def convert(x: Any) -> Any:
        is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
        if not is_key or jax.random.key_impl(x) != _UNROLLED:
            return x
        return jax.random.wrap_key_data(jax.random.key_data(x), impl=_JAX_OWN)

    return jax.tree.map(convert, tree)


def _threefry(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """The 20 rounds on pairs of words; key [2], words of one shape.

    Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405
    """
    first, second = key[0], key[1]
    schedule = [jnp.broadcast_to(k, low.shape) for k in (first, second, first ^ second ^ _PARITY)]
    high, low = high + schedule[0], low + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            high = high + low
            low = (low << np.uint32(distance)) | (low >> np.uint32(32 - distance))
            low = low ^ high
        high = high + schedule[(group + 1) % 3]
        low = low + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return high, low


def _counted(key: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Two words for each entry of a shape, from its number."""
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"a draw has less than 2**32 numbers, got {shape}. Draw in parts.")
    numbers = lax.iota(jnp.uint32, size).reshape(shape)
    return _threefry(key, jnp.zeros_like(numbers), numbers)


def _seed(seed: Array) -> Array:
    return jnp.stack([jnp.zeros((), jnp.uint32), seed.astype(jnp.uint32)])


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    # Without the barrier each draw from a new key would compute that key again.
    return jnp.stack(lax.optimization_barrier(_counted(key, shape)), axis=-1)


def _fold_in(key: Array, data: Array) -> Array:
    return jnp.stack(_threefry(key, jnp.zeros((), jnp.uint32), data.astype(jnp.uint32)))


def _random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    high, low = _counted(key, shape)
    if bit_width == 64:
        return (high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)
    bits = high ^ low
    return bits if bit_width == 32 else bits.astype(f"uint{bit_width}")


_UNROLLED = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name=f"{_JAX_OWN}_unrolled",
    tag="unr",
)
