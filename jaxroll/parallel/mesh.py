"""Meshes: which devices the actors are spread over."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxroll.checks import check_count, divisors
from jaxroll.types import PyTree

ACTORS = "actors"


def make_mesh(num_devices: int | None = None, *, devices: Any = None) -> Mesh:
    """A one-dimensional mesh named "actors" over this program's devices.

    Args:
      num_devices: how many; None: all there are, on all processes.
      devices: these and no others.

    Example:
      >>> make_mesh(1).shape["actors"]
      1
    """
    available = list(jax.devices() if devices is None else devices)
    count = len(available)
    if num_devices is not None:
        count = check_count("num_devices", num_devices, at_least=-(2**31))
    if not 1 <= count <= len(available):
        kind = available[0].platform if available else "any"
        way_out = (
            'On CPU, jax.config.update("jax_num_cpu_devices", '
            f"{count}) before the first use of a device gives that many."
            if kind == "cpu"
            else f"Use make_mesh({len(available)})."
        )
        raise ValueError(
            f"num_devices must be between 1 and the {len(available)} {kind} devices there are, got "
            f"{count}. {way_out}"
        )
    if jax.process_count() > 1 and count != len(available):
        raise ValueError(
            f"with several processes the mesh takes all {len(available)} devices, got {count}. "
            "Use make_mesh()."
        )
    return Mesh(np.asarray(available[:count]), (ACTORS,), axis_types=(AxisType.Auto,))


def check_mesh(mesh: Mesh, num_actors: int, num_learners: int | None = None) -> None:
    """Raise if the actors cannot be spread evenly, or if not every device learns."""
    if mesh.axis_names != (ACTORS,):
        raise ValueError(
            f'the mesh must have the single axis "{ACTORS}", got {mesh.axis_names}. Use '
            "jaxroll.parallel.make_mesh(...)."
        )
    if num_actors % mesh.size:
        fitting = divisors(num_actors)
        raise ValueError(
            f"the number of devices must divide num_actors = {num_actors}, got {mesh.size}. Use "
            f"make_mesh({max(d for d in fitting if d <= mesh.size)}), or a num_actors that is a "
            f"multiple of {mesh.size}; {num_actors} is divided by {fitting}."
        )
    if num_learners is not None and num_learners != mesh.size:
        raise ValueError(
            f"every device acts and learns, so num_learners is the mesh's size, {mesh.size}; got "
            f"{num_learners}. Leave it out."
        )


def place(tree: PyTree, mesh: Mesh, specs: PyTree) -> PyTree:
    """Put a tree that every process has in full, or that is there already, onto the mesh.

    Args:
      tree: any pytree of arrays.
      mesh: where to.
      specs: a prefix of the tree, of PartitionSpecs.
    """
    leaves, structure = jax.tree.flatten(tree)
    flat = shardings(tree, mesh, specs)
    return jax.tree.unflatten(
        structure, [_put(x, s) for x, s in zip(leaves, jax.tree.leaves(flat))]
    )


def shardings(tree: PyTree, mesh: Mesh, specs: PyTree) -> PyTree:
    """A NamedSharding for each leaf of the tree; `specs` is a prefix of it."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(
        lambda spec, sub: jax.tree.map(lambda _: NamedSharding(mesh, spec), sub),
        specs,
        tree,
        is_leaf=is_spec,
    )


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x  # already there; other processes hold the rest
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        placed = jax.make_array_from_callback(data.shape, sharding, lambda i: data[i])
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda i: host[i])
