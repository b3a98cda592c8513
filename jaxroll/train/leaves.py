"""The leaves of a pytree as plain arrays, in the shards that each process holds, and back."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.types import PyTree


class Leaf(NamedTuple):
    """A leaf, or the template of one."""

    value: Any
    described: str  # dtype and shape, like float32[4, 64] or key<fry>[8]
    is_key: bool
    shape: tuple[int, ...]  # as stored: of a typed key, that of its data
    dtype: np.dtype


class Shard(NamedTuple):
    """A part of a leaf that one process holds."""

    leaf: str
    start: list[int]  # its first index in the leaf
    values: np.ndarray


def named_leaves(tree: PyTree) -> dict[str, Leaf]:
    """The leaves by their paths; `TypeError` for what is no number."""
    leaves: dict[str, Leaf] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(f"two leaves have the path {name!r}; rename a key, as without its '/'")
        x = np.asarray(value) if isinstance(value, bool | int | float | complex) else value
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"leaves must be arrays, typed keys or Python numbers, got {type(x).__name__} "
                f"at {name!r}. Put it into the config, or make it a static field."
            )
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        stored = jax.eval_shape(jax.random.key_data, x) if is_key else x
        dtype = np.dtype(stored.dtype)
        if dtype.kind in "OSUMm" or dtype.fields or not dtype.isnative:
            raise TypeError(f"cannot store {dtype} at {name!r}. Cast it to a plain number type.")
        described = f"{x.dtype}{list(x.shape)}"
        leaves[name] = Leaf(value, described, is_key, stored.shape, dtype)
    return leaves


def copy_shards(leaves: dict[str, Leaf]) -> list[Shard]:
    """The part that this process holds; copied, since the leaves may be donated next."""
    data = {n: jax.random.key_data(x.value) if x.is_key else x.value for n, x in leaves.items()}
    for x in data.values():  # all transfers under way before the first is waited for
        if isinstance(x, jax.Array) and x.is_fully_addressable:
            x.copy_to_host_async()
    shards: list[Shard] = []
    for name, x in data.items():
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            own = [shard for shard in x.addressable_shards if shard.replica_id == 0]
            shards += [Shard(name, [s.start or 0 for s in o.index], np.array(o.data)) for o in own]
        elif jax.process_index() == 0:
            shards.append(Shard(name, [0] * np.ndim(x), np.array(x)))
    return [shard for shard in shards if shard.values.size]


def differences(saved: dict[str, str], leaves: dict[str, Leaf]) -> list[str]:
    """Why leaves that are so described cannot be restored into these."""
    expected = {name: leaf.described for name, leaf in leaves.items()}
    return [
        f"{name}: saved {saved.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
        for name in expected | saved
        if saved.get(name) != expected.get(name)
    ] + [
        f"{name}: {x.dtype} needs jax.config.update('jax_enable_x64', True), or a numpy template"
        for name, x in leaves.items()
        if isinstance(x.value, jax.Array | jax.ShapeDtypeStruct)
        if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype
    ]


def restore(leaf: Leaf, shards: list[Shard], sharding: Any) -> Any:
    """A leaf of the same kind as its template: numpy on the host, uncommitted if that is."""
    template = leaf.value
    part = functools.partial(_assemble, leaf, shards)
    if not isinstance(template, jax.Array | jax.ShapeDtypeStruct):
        data = part([slice(None)] * len(leaf.shape))
        if isinstance(template, np.ndarray | np.generic):
            return data if isinstance(template, np.ndarray) else data[()]
        return type(template)(data.item())
    if sharding is None and getattr(template, "committed", True):
        sharding = template.sharding
    if leaf.is_key and sharding is not None and isinstance(sharding, jax.NamedSharding):
        # The data has a trailing axis that the key's sharding does not name: it stays whole.
        axes = tuple(sharding.spec)[: len(template.shape)]
        sharding = jax.NamedSharding(sharding.mesh, jax.P(*axes))
    if sharding is None:
        data = jax.device_put(part([slice(None)] * len(leaf.shape)))
    else:
        data = jax.make_array_from_callback(leaf.shape, sharding, part, dtype=leaf.dtype)
    return jax.random.wrap_key_data(data, impl=template.dtype) if leaf.is_key else data


def _assemble(leaf: Leaf, shards: list[Shard], index: Any) -> np.ndarray:
    """One part of a leaf, copied from all shards that it overlaps."""
    bounds = [s.indices(size)[:2] for s, size in zip(index, leaf.shape)]
    part = np.zeros([end - begin for begin, end in bounds], leaf.dtype)
    for _, start, values in shards:
        into, out_of = [], []
        for (begin, end), first, size in zip(bounds, start, values.shape):
            low = max(begin, first)
            high = max(low, min(end, first + size))
            into.append(slice(low - begin, high - begin))
            out_of.append(slice(low - first, high - first))
        part[tuple(into)] = values[tuple(out_of)]
    return part
