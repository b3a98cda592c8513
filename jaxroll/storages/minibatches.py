"""Which rows go into which minibatch: a plan of index and weight arrays, and nothing moved yet.

A plan is made once for all epochs and scanned; each of its rows picks one minibatch out of the
storage, so the shuffled rollout never exists as a whole.

What a row counts depends on `by`. A step is element t·B + b of the flattened [T, B]; a sequence
is chunk c of L steps of environment b, number c·B + b; an environment is a sequence of all T steps.
"""

from __future__ import annotations

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxroll.checks import (
    check_choice,
    check_count,
    check_divides,
    check_flag,
    check_key,
    divisors,
)
from jaxroll.types import Array, Node, PyTree

# A power of two from this on is shuffled by so many pairs of Feistel rounds.
_SHUFFLED_SIZE, _ROUNDS = 256, 6
By = Literal["step", "sequence", "environment"]
Remainder = Literal["error", "drop", "pad"]


class MinibatchPlan(Node):
    """Rows of all minibatches of all epochs; `jax.lax.scan` over it gives one at a time.

    Attributes:
      indices: [E·M, N] int32 into the steps or sequences.
      weights: [E·M, N] float32, 0 where a row only pads.
      sequence_length: L for sequences, None for steps; static.
    """

    indices: Array
    weights: Array
    sequence_length: int | None = struct.field(pytree_node=False, default=None)

    def __len__(self) -> int:
        return self.indices.shape[0]


def plan(
    key: jax.Array | None,
    *,
    num_steps: int,
    num_envs: int,
    num_mini_batch: int | None = None,
    mini_batch_size: int | None = None,
    num_epochs: int = 1,
    shuffle: bool = True,
    by: By = "step",
    sequence_length: int | None = None,
    remainder: Remainder = "error",
) -> MinibatchPlan:
    """Split T·B steps (or the sequences they form) into minibatches, for each epoch anew.

    Args:
      key: a PRNG key; None only without shuffling.
      num_steps: T.
      num_envs: B.
      num_mini_batch: M, minibatches per epoch; with neither this nor the size, one.
      mini_batch_size: N, rows per minibatch (steps, sequences or environments).
      num_epochs: E; every epoch has its own permutation.
      shuffle: False keeps the order t·B + b.
      by: what a row is: "step", "sequence" (of `sequence_length` steps) or "environment".
      sequence_length: L, must divide T; only for sequences.
      remainder: rows that do not fill a minibatch are an "error", or are left out ("drop", other
        rows each epoch), or the last minibatch is filled up with rows of weight 0 ("pad").

    Returns:
      MinibatchPlan of [E·M, N] indices and weights.

    Example:
      >>> p = plan(jax.random.key(0), num_steps=4, num_envs=2, num_mini_batch=2)
      >>> p.indices.shape, sorted(p.indices.ravel().tolist())
      ((2, 4), [0, 1, 2, 3, 4, 5, 6, 7])
    """
    if isinstance(key, int):
        raise TypeError(
            f"the key comes first, got key={key}. Write (jax.random.key(0), num_mini_batch={key})."
        )
    if check_flag("shuffle", shuffle) and key is None:
        raise ValueError(
            "shuffle=True needs a key, got None. Give jax.random.key(0), or shuffle=False."
        )
    length = _length(by, num_steps, sequence_length)
    chunks = num_steps // (length or 1)
    total = chunks * num_envs
    what = f"num_steps{f' / {length}' if length else ''} * num_envs = {chunks} * {num_envs}"
    count, size = _sizes(total, what, num_mini_batch, mini_batch_size, remainder)
    num_epochs = check_count("num_epochs", num_epochs)
    if shuffle:
        keys = jax.random.split(check_key("key", key), num_epochs)
        order = jax.vmap(lambda k: permutation(k, total))(keys)
    else:
        order = np.broadcast_to(np.arange(total, dtype=np.int32), (num_epochs, total))
    used = count * size
    weights = np.broadcast_to(np.arange(used) < total, (num_epochs, used)).astype(np.float32)
    if used > total:
        pad = jnp.pad if shuffle else np.pad  # what is known needs no program
        order = pad(order, ((0, 0), (0, used - total)))
    return MinibatchPlan(
        indices=jnp.asarray(order[:, :used].reshape(-1, size)),
        weights=jnp.asarray(weights.reshape(-1, size)),
        sequence_length=length,
    )


def take(tree: PyTree, row: MinibatchPlan) -> PyTree:
    """The rows of one minibatch, picked from leaves [T, B, ...].

    Args:
      tree: leaves [T, B, ...].
      row: one row of a plan: indices [N].

    Returns:
      leaves [N, ...], or [L, N, ...] for sequences.

    Example:
      >>> steps = jnp.arange(8).reshape(4, 2)
      >>> take(steps, MinibatchPlan(jnp.array([5, 0]), jnp.ones(2))).tolist()
      [5, 0]
      >>> take(steps, MinibatchPlan(jnp.array([3, 0]), jnp.ones(2), sequence_length=2)).tolist()
      [[5, 0], [7, 2]]
    """

    def pick(x: Array) -> Array:
        flat = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
        return flat.at[flat_indices(row, x.shape[1])].get(mode="promise_in_bounds")

    return jax.tree.map(pick, tree)


def flat_indices(row: MinibatchPlan, num_envs: int) -> Array:
    """t·B + b of every step in one row of a plan: [N], or [L, N] for sequences."""
    if row.sequence_length is None:
        return row.indices
    chunk, env = jnp.divmod(row.indices, num_envs)
    start = chunk * (row.sequence_length * num_envs) + env
    ahead = jnp.arange(row.sequence_length, dtype=row.indices.dtype) * num_envs
    return ahead[:, None] + start[None, :]


@functools.partial(jax.jit, static_argnums=1, inline=True)
def permutation(key: jax.Array, n: int) -> Array:
    """A random permutation of 0 … n − 1.

    A power of two of at least 256 is shuffled by a Feistel network of 12 rounds: arithmetic on each
    index alone, no sort, and a permutation by construction. It is pseudo-random: 384 of the key's
    bits pick it, so not each of the n! can come. Any other n is left to `jax.random.permutation`.

    Args:
      key: a PRNG key.
      n: static.

    Returns:
      [n] int32.

    Example:
      >>> sorted(permutation(jax.random.key(0), 5).tolist())
      [0, 1, 2, 3, 4]

    Mitchell et al., 2021, "Bandwidth-optimal random shuffling for GPUs"
    """
    if n >= _SHUFFLED_SIZE and n & (n - 1) == 0:
        return _feistel(key, n)
    return jax.random.permutation(key, n).astype(jnp.int32)


def _feistel(key: jax.Array, n: int) -> Array:
    """Indices as two halves of bits, each in turn changed by a random function of the other."""
    bits = n.bit_length() - 1
    low_bits = bits // 2
    index = jnp.arange(n, dtype=jnp.uint32)
    high, low = index >> low_bits, index & np.uint32((1 << low_bits) - 1)
    for secret in jax.random.bits(key, (_ROUNDS, 2), jnp.uint32):
        high = high ^ (_mixed(low, secret[0]) >> np.uint32(32 - (bits - low_bits)))
        low = low ^ (_mixed(high, secret[1]) >> np.uint32(32 - low_bits))
    return ((high << low_bits) | low).astype(jnp.int32)


def _mixed(x: Array, secret: Array) -> Array:
    """A word that depends on all bits of x and of the secret, its upper bits most."""
    x = (x ^ secret) * np.uint32(0x9E3779B1)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x85EBCA77)
    return (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE3D)


def _length(by: By, num_steps: int, sequence_length: int | None) -> int | None:
    """How many steps a row has; None: it is a single one."""
    check_choice("by", by, get_args(By))
    if by == "sequence" and sequence_length is None:
        raise ValueError(
            'by="sequence" needs sequence_length. Use by="environment" for whole rollouts.'
        )
    if by == "step" and sequence_length is not None:
        raise ValueError(
            f'by="step" has no sequence_length, got {sequence_length}. Use by="sequence".'
        )
    if by == "environment" and sequence_length not in (None, num_steps):
        raise ValueError(
            f'by="environment" takes whole rollouts of {num_steps} steps, got sequence_length='
            f'{sequence_length}. Use by="sequence".'
        )
    if by == "sequence":
        return check_divides("sequence_length", sequence_length, num_steps, "num_steps")
    return num_steps if by == "environment" else None


def _sizes(
    total: int, what: str, count: int | None, size: int | None, remainder: Remainder
) -> tuple[int, int]:
    """(minibatches, rows each); raises when they do not fit and the remainder is an error."""
    check_choice("remainder", remainder, get_args(Remainder))
    both = {"num_mini_batch": count, "mini_batch_size": size}
    given = [(name, check_count(name, n)) for name, n in both.items() if n is not None]
    name, n = given[0] if given else ("num_mini_batch", 1)
    if len(given) == 2:
        count, size = n, given[1][1]
    else:
        other = total // n if remainder == "drop" else -(-total // n)
        count, size = (n, other) if name == "num_mini_batch" else (other, n)
    used = count * size
    fits = {
        "error": used == total,
        "drop": 0 < used <= total,
        "pad": total <= used < total + size,
    }
    if fits[remainder]:
        return count, size
    if len(given) == 2:
        raise ValueError(
            f"num_mini_batch * mini_batch_size = {count} * {size} = {used} does not fit {what} = "
            f'{total} with remainder="{remainder}". Give only one of the two.'
        )
    if remainder == "error":
        near = min(divisors(total), key=lambda d: (abs(d - n), -d))
        raise ValueError(
            f'{name} must divide {what} = {total}, got {n}. Use {near}, or remainder="drop".'
        )
    fitting = total if n > total else -(-total // size)
    raise ValueError(
        f"{name} = {n} leaves minibatches without a row, since {what} = {total}. Use {fitting}."
    )
