"""Optimisers whose clip, guard and report share one norm, and the step that uses them.

A small network has a dozen small leaves, and an operation for each costs more than its work.
`flatten` keeps an optimiser's state as one vector while many steps are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from jaxroll.types import Array, PyTree

# So many numbers fit into a cache, so that a copy of them as one vector costs next to nothing.
_SMALL = 2**16


class Guarded(optax.GradientTransformationExtraArgs):
    """An optimiser that guards its own state.

    `update` takes the gradient's `norm` as well, and changes nothing where that is not finite.
    Apart from the norm it treats every number alike: a small network's leaves may come to it as
    one vector. Any other optax transformation is guarded from outside, at the price of a copy of
    its state, and always sees the leaves.
    """


def clipped_adam(
    learning_rate: Array, max_norm: Array, *, epsilon: Array, b1: float = 0.9, b2: float = 0.999
) -> Guarded:
    """Adam behind a clip of the gradient's global norm (Kingma & Ba, 2015).

        m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²,  θ ← θ − α m̂ / (√v̂ + ε)

    Args:
      learning_rate: α.
      max_norm: the gradient is scaled down to this norm; inf: never.
      epsilon: ε.
      b1: β₁.
      b2: β₂.

    Example:
      >>> optimizer = clipped_adam(jnp.float32(0.1), jnp.float32(1.0), epsilon=jnp.float32(1e-5))
      >>> params = {"w": jnp.zeros(2)}
      >>> grads = {"w": jnp.array([3.0, -4.0])}
      >>> params, _, report = apply_gradient(optimizer, params, optimizer.init(params), grads)
      >>> params["w"].round(3), float(report["grad_norm"])
      (Array([-0.1,  0.1], dtype=float32), 5.0)
    """
    init = optax.scale_by_adam(b1, b2).init

    def update(grads: PyTree, state: Any, params: Any = None, *, norm: Any = None) -> Any:
        finite, grads = _scaled(grads, norm, max_norm)
        count = state.count + finite.astype(state.count.dtype)
        times = jnp.maximum(count, 1).astype(jnp.float32)
        mu = _decayed(state.mu, grads, b1, finite)
        nu = _decayed(state.nu, jax.tree.map(jnp.square, grads), b2, finite)
        step = jnp.where(finite, learning_rate, 0) / (1 - b1**times)
        scale = jax.lax.rsqrt(1 - b2**times)
        updates = jax.tree.map(
            lambda m, v: -(step * m / (jnp.sqrt(v) * scale + epsilon)).astype(m.dtype), mu, nu
        )
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return Guarded(init, update)  # pyright: ignore[reportArgumentType]


def clipped_rmsprop(
    learning_rate: Array, max_norm: Array, *, decay: Array, epsilon: Array
) -> Guarded:
    """RMSprop behind a clip of the gradient's global norm; ε stands under the root.

        v ← ρ v + (1 − ρ) g²,  θ ← θ − α g / √(v + ε)

    Args:
      learning_rate: α.
      max_norm: the gradient is scaled down to this norm; inf: never.
      decay: ρ.
      epsilon: ε.
    """
    init = optax.scale_by_rms().init

    def update(grads: PyTree, state: Any, params: Any = None, *, norm: Any = None) -> Any:
        finite, grads = _scaled(grads, norm, max_norm)
        nu = _decayed(state.nu, jax.tree.map(jnp.square, grads), decay, finite)
        step = jnp.where(finite, learning_rate, 0)
        updates = jax.tree.map(
            lambda g, v: -(step * g * jax.lax.rsqrt(v + epsilon)).astype(g.dtype), grads, nu
        )
        return updates, state._replace(nu=nu)

    return Guarded(init, update)  # pyright: ignore[reportArgumentType]


def _scaled(grads: PyTree, norm: Any, max_norm: Array) -> tuple[Array, PyTree]:
    """(whether the norm is finite, the gradient clipped to it, or zeros)."""
    norm = global_norm(grads) if norm is None else norm
    finite = jnp.isfinite(norm)
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12))
    return finite, jax.tree.map(lambda g: jnp.where(finite, g * factor.astype(g.dtype), 0), grads)


def _decayed(moments: PyTree, news: PyTree, decay: Any, finite: Array) -> PyTree:
    """Exponential averages; scalars decide whether they move, so that they are written in place."""
    kept, gained = jnp.where(finite, decay, 1.0), jnp.where(finite, 1 - decay, 0.0)
    return jax.tree.map(
        lambda m, g: kept.astype(m.dtype) * m + gained.astype(m.dtype) * g, moments, news
    )


def global_norm(grads: PyTree) -> Array:
    """[] √Σ g² over all leaves, in float32.

    Example:
      >>> float(global_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array(-4.0)}))
      5.0
    """
    if _is_small(grads):
        return jnp.sqrt(jnp.sum(jnp.square(ravel_pytree(grads)[0])))
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))


def _is_small(tree: PyTree) -> bool:
    """Whether a tree is better handled as one vector."""
    leaves = jax.tree.leaves(tree)
    is_float = all(x.dtype == jnp.float32 for x in leaves)
    return len(leaves) > 1 and is_float and sum(x.size for x in leaves) <= _SMALL


def flatten(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree
) -> tuple[optax.GradientTransformation, PyTree, Callable[[PyTree], PyTree]]:
    """An optimiser for many steps in a loop: of a small network it keeps its state as vectors.

    Args:
      optimizer: any; only a `Guarded` one is changed, whose arithmetic is elementwise.
      params: its params, for their shapes.
      opt_state: its state.

    Returns:
      (optimiser, state, restore): `restore(state)` has the structure of `opt_state` again.

    Example:
      >>> adam = clipped_adam(jnp.float32(0.1), jnp.float32(1.0), epsilon=jnp.float32(1e-5))
      >>> params = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}
      >>> flat, state, restore = flatten(adam, params, adam.init(params))
      >>> state.mu.shape, restore(state).mu["w"].shape
      ((9,), (2, 3))
    """
    if not isinstance(optimizer, Guarded) or not _is_small(params):
        return optimizer, opt_state, lambda state: state
    structure, unravel = jax.tree.structure(params), ravel_pytree(params)[1]

    def is_like_params(x: PyTree) -> bool:
        return jax.tree.structure(x) == structure

    parts, whole = jax.tree.flatten(opt_state, is_leaf=is_like_params)
    flags = [is_like_params(part) for part in parts]

    def update(grads: PyTree, state: Any, params: Any = None, *, norm: Any = None) -> Any:
        vector: Any = ravel_pytree(grads)[0]
        vector, state = optimizer.update(vector, state, norm=norm)
        return unravel(vector), state

    def restore(state: PyTree) -> PyTree:
        found = whole.flatten_up_to(state)
        return whole.unflatten([unravel(x) if flag else x for x, flag in zip(found, flags)])

    vectors = [ravel_pytree(part)[0] if flag else part for part, flag in zip(parts, flags)]
    flat = Guarded(optimizer.init, update)  # pyright: ignore[reportArgumentType]
    return flat, whole.unflatten(vectors), restore


def apply_gradient(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, grads: PyTree
) -> tuple[PyTree, PyTree, dict[str, Array]]:
    """One optimiser step; a gradient that is not finite changes nothing and is counted.

    Returns:
      (params, opt_state, report): `grad_norm` [], before clipping, and `nonfinite` [leaves]
      int32, 1 for each leaf of params whose gradient is not finite.
    """
    norm = global_norm(grads)
    finite = jnp.isfinite(norm)
    if isinstance(optimizer, Guarded):
        updates, new_state = optimizer.update(grads, opt_state, params, norm=norm)
        new_params = optax.apply_updates(params, updates)
    else:
        updates, new_state = optimizer.update(grads, opt_state, params)
        new_params, new_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (optax.apply_updates(params, updates), new_state),
            (params, opt_state),
        )
    report = {"grad_norm": jnp.where(finite, norm, 0), "nonfinite": _nonfinite(grads, finite)}
    return new_params, new_state, report


def _nonfinite(grads: PyTree, finite: Array) -> Array:
    """[leaves] 1 where a leaf's squares do not add up to a number, if the norm is not finite.

    All squares may be finite and their sum not: then the leaf of the largest is named. Always
    computed: a branch on data would make the host wait on a GPU.
    """
    leaves = jax.tree.leaves(grads)
    squares = jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in leaves])
    bad = ~jnp.isfinite(squares)
    largest = jnp.arange(len(leaves)) == jnp.argmax(squares)
    named = jnp.where(jnp.any(bad), bad, largest)
    return (~finite & named).astype(jnp.int32)
