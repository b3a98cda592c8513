"""What storages share: allocating from an example, and checking data against it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.checks import check_array, check_kind, check_number
from jaxroll.types import Array, PyTree, Transition, as_leaf, path_name
from jaxroll.varying import vary_as

_FLAGS = ("terminated", "truncated", "is_first", "valid")
_ONE_PER_STEP = (*_FLAGS, "reward", "value", "bootstrap_value", "log_prob")


def check_example(example: Transition) -> int:
    """B, after checking that one step has leaves [B, ...], and [B] where one number is meant."""
    maker = "Transition(obs=..., action=..., reward=..., terminated=..., extras=...)"
    check_kind("example", example, Transition, maker)
    named = ((path_name(path), x) for path, x in jax.tree.leaves_with_path(example))
    leaves = {name: check_array(name, x) for name, x in named}
    batch = {x.shape[:1] for x in leaves.values()}
    if len(batch) != 1 or batch == {()}:
        shown = ", ".join(f"{name} {list(x.shape)}" for name, x in leaves.items())
        raise ValueError(
            f"every leaf of the example must start with the same axis B, got {shown}. "
            "Write x[None] for a single environment."
        )
    (num_envs,) = batch.pop()
    for name, x in leaves.items():
        field = name.partition(".")[0]
        if field in _ONE_PER_STEP:
            check_array(name, x, (num_envs,), " = [B] (or be a dict of such streams)")
        if field in _FLAGS and x.dtype != np.bool_:
            raise TypeError(f"{name} must be bool, got {x.dtype}. Use {name}.astype(bool).")
    return num_envs


def check_streams(name: str, tree: PyTree, value: PyTree) -> None:
    """Raise unless `tree` is a dict of the same streams as `value`, or single as it is."""
    if jax.tree.structure(tree) != jax.tree.structure(value):
        want, got = (sorted(x) if isinstance(x, dict) else "a single one" for x in (value, tree))
        raise ValueError(f"{name} must have the streams of value, {want}, got {got}.")


def allocate(example: PyTree, size: int) -> PyTree:
    """Zeros like `example`, with an axis of this size in front."""

    def zeros(x: Any) -> Array:
        dtype, shape = jnp.result_type(x), (size, *np.shape(x))
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(x)), shape)
        return jnp.zeros(shape, dtype)

    return jax.tree.map(zeros, example)


def row_like(tree: PyTree) -> PyTree:
    """Shape and dtype of one row of leaves [T, ...]."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def vary_leaves(tree: PyTree, like: PyTree) -> PyTree:
    """Each leaf varying over the mesh at least as the one that it replaces: scans need that."""
    return jax.tree.map(vary_as, tree, like)


def check_like(
    what: str, got: PyTree, expected: PyTree, leading: tuple[int, ...] = (), of: str = "example"
) -> PyTree:
    """`got` as arrays, after checking structure, shapes and dtypes against `expected`.

    Args:
      what: how to call it in an error.
      got: leaves [*leading, ...].
      expected: leaves [...] that give shape and dtype.
      leading: axes that `got` has in front.
      of: the argument of `create` from which `expected` comes.
    """
    if jax.tree.structure(got) != jax.tree.structure(expected):
        want, given = (
            ", ".join(path_name(path) or type(x).__name__ for path, x in leaves)
            for leaves in map(jax.tree.leaves_with_path, (expected, got))
        )
        raise ValueError(
            f"{what} must have the structure of the {of} given to create.\n"
            f"  created with: {want or 'nothing'}\n  got:          {given or 'nothing'}\n"
            "Leave out of both, or give to both, what differs."
        )

    def convert(path: Any, like: Any, x: Any) -> jax.Array:
        name = f"{what}: {path_name(path)}"
        x = jnp.asarray(check_array(name, x, (*leading, *like.shape)))
        if x.dtype != like.dtype:
            raise TypeError(
                f"{name} must be {like.dtype} as in the {of} given to create, got {x.dtype}. "
                f"Use .astype({str(like.dtype)!r}), or create from an example of {x.dtype}."
            )
        return x

    return jax.tree_util.tree_map_with_path(convert, expected, got)


def as_parameter(name: str, value: PyTree, like: PyTree, rule: str | None = None) -> PyTree:
    """A hyperparameter as leaves like the old ones; one number serves all streams of a dict."""
    if like is None and value is not None:
        raise ValueError(f"this storage was created without {name}. Give {name} to create.")
    if isinstance(like, dict):
        each = value if isinstance(value, dict) else dict.fromkeys(like, value)
        check_streams(name, each, like)
        return {s: as_parameter(f"{name}[{s!r}]", each[s], like[s], rule) for s in like}
    if like is None or not hasattr(like, "dtype") or isinstance(value, jax.ShapeDtypeStruct):
        return value  # axes of a vmap, shardings, shapes
    if isinstance(value, dict):
        check_streams(name, value, like)
    if like.dtype != np.bool_:
        check_number(name, value, rule, shape=np.shape(like))
    elif getattr(value, "dtype", type(value)) not in (bool, np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return value.astype(like.dtype)
    return as_leaf(value, like=like)


def check_finite(tree: PyTree, used: np.ndarray, what: str) -> None:
    """Raise if a floating point leaf [T, B, ...] is not finite in a row that is used."""
    for path, x in jax.tree.leaves_with_path(jax.device_get(tree)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        rows = used.reshape(*used.shape, *[1] * (x.ndim - 2))
        bad = (~np.isfinite(x.astype(np.float32)) & rows).reshape(*used.shape, -1).any(-1)
        if bad.any():
            t, b = np.argwhere(bad)[0]
            raise ValueError(
                f"{path_name(path)} is not finite in {bad.sum()} rows, first at step {t} of {what} "
                f"{b}. Look at the reward, value and last_values that were given there."
            )
