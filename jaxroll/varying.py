"""Arrays inside `jax.shard_map`: over which mesh axes they vary."""

from __future__ import annotations

import jax
from jax import lax

from jaxroll.types import PyTree


def vary_as(tree: PyTree, like: PyTree) -> PyTree:
    """The same arrays, marked as varying over every mesh axis over which a leaf of `like` varies.

    With `check_vma=True` a constant does not vary, so it cannot start a scan whose carry depends on
    data of one device. Outside of shard_map this does nothing.

    Args:
      tree: arrays that start a carry.
      like: the data with which the carry will be mixed.

    Example:
      >>> vary_as(jax.numpy.zeros(3), like=jax.numpy.ones(2)).shape
      (3,)
    """
    axes = frozenset().union(*(_axes(x) for x in jax.tree.leaves(like)))
    if not axes:
        return tree

    def mark(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def _axes(x: object) -> frozenset[str]:
    if not isinstance(x, jax.Array):  # numpy arrays and Python numbers are constants
        return frozenset()
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # jax 0.10; `vma` before
    return getattr(aval, "vma", frozenset()) if manual is None else manual.varying
