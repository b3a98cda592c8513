"""A pytree as named leaves: what is stored, what is checked, and how it becomes a tree again.

The tree's classes are never stored, only arrays under paths such as "params/Dense_0/kernel".
A template gives the structure back, so reading a checkpoint builds no object that the reader
did not bring along.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.checkpoints.errors import MismatchError
from jaxroll.types import PyTree

SCALARS = (bool, int, float, complex)
_SHOWN = 8  # mismatches named in full before "and n more"


class Spec(NamedTuple):
    """Shape and dtype of a leaf as its owner sees it; a typed key has a dtype like `key<fry>`."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves by path, in the tree's order; None and empty subtrees have none.

    Example:
      >>> list(named_leaves({"params": {"w": np.ones(2)}, "extras": None, "count": 3}))
      ['count', 'params/w']
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(
                f"two leaves have the path {name!r}; rename a key, for instance without its '/'"
            )
        leaves[name] = leaf
    return leaves


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def spec_of(name: str, leaf: Any) -> Spec:
    """Shape and dtype of a leaf; raises `TypeError` for what cannot be stored."""
    if is_key(leaf):
        return Spec(tuple(leaf.shape), str(leaf.dtype))
    if isinstance(leaf, SCALARS):
        leaf = np.asarray(leaf)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(
            f"leaves must be arrays, typed keys or Python numbers, got {type(leaf).__name__} "
            f"at {name!r}. Put it into the config, or make it a static field."
        )
    dtype = np.dtype(leaf.dtype)
    if dtype.hasobject or dtype.kind in "SUMm" or not dtype.isnative or dtype.name == "uint4":
        raise TypeError(f"cannot store dtype {dtype} at {name!r}. Cast it to a plain number type.")
    return Spec(tuple(leaf.shape), dtype.name)


def snapshot(leaf: Any) -> Any:
    """A copy that stays as it is, whatever is donated or written into afterwards.

    On the host where this process holds the whole array; on the devices where it is spread over
    several processes.
    """
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return leaf.copy()
    return np.array(leaf)


def stored_form(leaf: Any) -> Any:
    """Shape and dtype of a leaf's data as stored: a typed key's are those of its key data."""
    if is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return np.asarray(leaf) if isinstance(leaf, SCALARS) else leaf


def check_specs(saved: dict[str, Spec], expected: dict[str, Spec], where: str) -> None:
    """Raise `MismatchError` that names every leaf in which the two differ."""
    problems = [
        f"{name}: saved {saved[name]}, expected {spec}"
        for name, spec in expected.items()
        if name in saved and saved[name] != spec
    ]
    problems += [
        f"{name}: expected {spec}, not saved"
        for name, spec in expected.items()
        if name not in saved
    ]
    problems += [
        f"{name}: saved {spec}, not expected"
        for name, spec in saved.items()
        if name not in expected
    ]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        listed = "\n".join(f"  {line}" for line in problems[:_SHOWN] + more)
        raise MismatchError(
            f"the checkpoint {where} does not fit the given tree:\n{listed}\n"
            "Restore into a tree of the same architecture; the config that it was saved with "
            "is in its manifest.json."
        )


def check_holdable(name: str, like: Any) -> None:
    """Raise `MismatchError` where a device array is asked for that jax would silently narrow."""
    on_device = isinstance(like, jax.Array | jax.ShapeDtypeStruct) and not is_key(like)
    if on_device and jax.dtypes.canonicalize_dtype(like.dtype) != like.dtype:
        raise MismatchError(
            f"{name} is {like.dtype}, which this program cannot hold on a device. Set "
            'jax.config.update("jax_enable_x64", True), or restore into a numpy template.'
        )


def target_sharding(leaf: Any, given: Any) -> jax.sharding.Sharding | None:
    """Where a leaf's stored data goes; None: to the host, or uncommitted to the default device."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None  # numpy and Python numbers stay on the host
    sharding = given
    if sharding is None and isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = leaf.sharding
    if sharding is None and isinstance(leaf, jax.Array) and leaf.committed:
        sharding = jax.random.key_data(leaf).sharding if is_key(leaf) else leaf.sharding
    # A key's data has a trailing axis that its sharding does not name: it stays whole.
    if is_key(leaf) and isinstance(sharding, jax.NamedSharding):
        axes = tuple(sharding.spec)[: len(leaf.shape)]
        sharding = jax.NamedSharding(sharding.mesh, jax.P(*axes))
    return sharding


def rebuild(like: Any, sharding: Any, stored: Any) -> Any:
    """The stored array as the kind of leaf that the template has."""
    if is_key(like):
        data = jax.device_put(stored) if sharding is None else stored
        return jax.random.wrap_key_data(data, impl=like.dtype)
    if isinstance(like, SCALARS):
        return type(like)(stored.item())
    if isinstance(like, np.generic):
        return stored[()]
    if isinstance(like, np.ndarray) or sharding is not None:
        return stored
    return jax.device_put(stored)
