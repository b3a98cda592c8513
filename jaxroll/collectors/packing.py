"""Small leaves of many kinds as one array of words, so that a loop's step moves one array.

A step of a rollout carries and writes a dozen leaves of a few numbers each. Every operation has a
price of its own, a fraction of a microsecond on a CPU and a launch on a GPU, that is more than
such a leaf's work. Bits are moved, never converted, so that nothing changes but the time.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxroll.types import Array, PyTree

# A larger leaf is worth an operation of its own; an array of many such is slower than they are.
_SMALL_BYTES = 4096
_WORD = jnp.uint32


class Packed(NamedTuple):
    """A tree as it is carried: one array for all small leaves, and the others."""

    words: Array | None  # [..., B, K]
    others: list[Array]


class _Leaf(NamedTuple):
    shape: tuple[int, ...]  # [B, ...]
    dtype: Any
    num_words: int


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each leaf of a tree lies in its packed form.

    Example:
      >>> tree = {"obs": jnp.ones((3, 2)), "done": jnp.zeros(3, bool), "frame": jnp.ones((1, 3))}
      >>> packing = Packing.of(tree, num_rows=3)
      >>> packed = packing.pack(tree)
      >>> packed.words.shape, [x.shape for x in packed.others]
      ((3, 3), [(1, 3)])
      >>> packing.unpack(packed)["obs"].dtype
      dtype('float32')
    """

    structure: Any
    leaves: tuple[_Leaf | None, ...]  # None: one of the others

    @classmethod
    def of(cls, tree: PyTree, num_rows: int) -> Packing:
        """For trees of these shapes; small leaves are those of [num_rows, ...] words or flags."""
        leaves, structure = jax.tree.flatten(tree)
        found = [_leaf(x, num_rows) for x in leaves]
        if sum(leaf is not None for leaf in found) < 2:
            found = [None] * len(found)
        return cls(structure, tuple(found))

    def pack(self, tree: PyTree) -> Packed:
        """The packed form of a tree of the same shapes."""
        words, others = [], []
        for x, leaf in zip(self.structure.flatten_up_to(tree), self.leaves):
            if leaf is None:
                others.append(x)
            else:
                rows = x.reshape(x.shape[0], leaf.num_words)
                is_flag = leaf.dtype == bool
                words.append(
                    rows.astype(_WORD) if is_flag else lax.bitcast_convert_type(rows, _WORD)
                )
        return Packed(jnp.concatenate(words, axis=1) if words else None, others)

    def unpack(self, packed: Packed) -> PyTree:
        """The tree again; leading axes, such as time after a scan, go before all leaves."""
        words, others = packed.words, iter(packed.others)
        found, start = [], 0
        for leaf in self.leaves:
            if leaf is None:
                found.append(next(others))
                continue
            assert words is not None
            rows = words[..., start : start + leaf.num_words]
            start += leaf.num_words
            is_flag = leaf.dtype == bool
            rows = rows != 0 if is_flag else lax.bitcast_convert_type(rows, leaf.dtype)
            found.append(rows.reshape(*words.shape[:-2], *leaf.shape))
        return self.structure.unflatten(found)


def _leaf(x: Array, num_rows: int) -> _Leaf | None:
    if not x.size or not x.ndim or x.shape[0] != num_rows or 4 * x.size > _SMALL_BYTES:
        return None
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # keys
        return None
    is_word = x.dtype.itemsize == 4 and x.dtype.kind in "fiu"
    return _Leaf(x.shape, x.dtype, x.size // num_rows) if is_word or x.dtype == bool else None
