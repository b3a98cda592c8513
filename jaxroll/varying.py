"""Arrays inside `jax.shard_map`: over which mesh axes they vary."""

from __future__ import annotations

from typing import Any

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


def replicate(tree: PyTree, axis_name: Any) -> PyTree:
    """The same arrays, equal on all devices of a mesh axis, marked as not varying over it.

    With `check_vma=True` what was gathered still counts as varying, and cannot leave shard_map by
    `PartitionSpec()`. The largest of equal numbers is that number, bit by bit. Where nothing is
    checked, or `axis_name` is None, this does nothing.
    """
    names = frozenset(axis_name if isinstance(axis_name, tuple) else (axis_name,))

    def one(x: jax.Array) -> jax.Array:
        axes = tuple(sorted(names & _axes(x)))
        if not axes:
            return x
        if x.dtype == bool:
            return lax.pmax(x.astype("int8"), axes).astype(bool)
        return lax.pmax(x, axes)

    return jax.tree.map(one, tree)


def _axes(x: object) -> frozenset[str]:
    if not isinstance(x, jax.Array):  # numpy arrays and Python numbers are constants
        return frozenset()
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # jax 0.10; `vma` before
    return getattr(aval, "vma", frozenset()) if manual is None else manual.varying
