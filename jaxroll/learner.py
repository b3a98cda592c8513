"""From losses to params: gradients summed over all actors, one optimiser step, many of them.

A loss returns (Σ w·ℓ, Σ w, metrics) over the rows of one actor. The gradient is the sum over all
actors of the first's gradient, divided by the sum of the second: a mean of means would be wrong
as soon as rows are padded or invalid.

The actors of one device are the leading axis of what comes in; further devices are behind
`axis_name`. Two ways to add them up:

- "fast": all local actors as one batch, one all-reduce of the ravelled gradient. How actors are
  spread over devices changes the order of additions, and so the last bits.
- "exact": one actor after the other; each device adds a slice of the gradient over all actors, in
  their order, and the slices are gathered: bitwise the same on any number of devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from jaxroll.checks import check_choice
from jaxroll.storages.minibatches import MinibatchPlan
from jaxroll.types import Array, PyTree
from jaxroll.varying import replicate, vary_as

# On a CPU, rows that go through a loss together: their activations stay in the cache.
CHUNK_ROWS = 2048
Reduction = Literal["fast", "exact"]
Loss = Callable[[PyTree, Any], tuple[Array, Array, PyTree]]


def check_reduction(reduction: str) -> None:
    """Raise for anything but "fast" and "exact"."""
    check_choice("reduction", reduction, ("fast", "exact"))


def map_actors(function: Callable[..., Any], *trees: PyTree, reduction: Reduction) -> Any:
    """`function` of each local actor; leaves [A, ...] in and out.

    Args:
      function: of one actor's trees.
      *trees: leaves [A, ...].
      reduction: "exact" takes one actor after the other, so that none's arithmetic depends on
        how many there are; "fast" all at once.
    """
    count = jax.tree.leaves(trees)[0].shape[0]
    if reduction == "exact":
        return _one_by_one(function, trees)
    if count == 1:  # no batch axis, so that slices stay slices and matrices stay matrices
        out = function(*jax.tree.map(lambda x: x[0], trees))
        # Numpy stays numpy: what is known while tracing stays known.
        return jax.tree.map(lambda x: x[None], out)
    return jax.vmap(function)(*trees)


def _one_by_one(function: Callable[..., Any], trees: tuple[PyTree, ...]) -> Any:
    """`function` of each actor, by the same machine code however many there are here.

    Out of several actors a loop slices one, and the slice becomes part of what follows. Where there
    is only one, a compiler would drop loop and slice, and add in another order. So a single actor
    is put beside a copy that is never visited, and on a CPU the number of turns is hidden.
    """
    count = jax.tree.leaves(trees)[0].shape[0]
    turns = jax.lax.platform_dependent(
        cpu=lambda: jax.lax.optimization_barrier(jnp.int32(count)),
        default=lambda: jnp.int32(count),
    )
    if count == 1:
        trees = jax.tree.map(lambda x: jnp.concatenate([x, x]), trees)

    def at(i: Any) -> Any:
        return function(
            *jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), trees)
        )

    def turn(i: Any, out: Any) -> Any:
        put = jax.lax.dynamic_update_index_in_dim
        return jax.tree.map(lambda xs, x: put(xs, x, i, 0), out, at(i))

    shapes = jax.eval_shape(at, 0)
    start = jax.tree.map(lambda x: jnp.zeros((max(count, 2), *x.shape), x.dtype), shapes)
    out = jax.lax.fori_loop(0, turns, turn, vary_as(start, like=trees))
    return jax.tree.map(lambda x: x[:count], out)


def sum_actors(tree: PyTree, *, axis_name: Any = None, reduction: Reduction = "fast") -> PyTree:
    """Sum of leaves [A, ...] over all actors of all devices, the same everywhere.

    Args:
      tree: leaves [A, ...], A local actors.
      axis_name: the mesh axis behind which the other devices are; None: there are none.
      reduction: "exact" adds in the order of the actors.
    """
    if reduction == "fast":
        return all_sum(jax.tree.map(lambda x: jnp.sum(x, 0, dtype=x.dtype), tree), axis_name)
    if axis_name is not None and jax.lax.axis_size(axis_name) > 1:
        return replicate(_by_dtype(lambda x: _ordered_sum(x, axis_name), tree), axis_name)
    # A loop, so that on one device too the sum is not fused with what is made of it.
    first, rest = jax.tree.map(lambda x: x[0], tree), jax.tree.map(lambda x: x[1:], tree)
    total = jax.lax.scan(lambda a, b: (jax.tree.map(jnp.add, a, b), None), first, rest)[0]
    return replicate(total, axis_name)


def _ordered_sum(x: Array, axis_name: Any) -> Array:
    """[A, P] to [P]: each of D devices adds P/D columns of all actors, one after the other."""
    size = x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, -size % jax.lax.axis_size(axis_name))))
    x = jax.lax.all_to_all(x, axis_name, split_axis=1, concat_axis=0, tiled=True)
    total = functools.reduce(jnp.add, list(x))
    return jax.lax.all_gather(total, axis_name, tiled=True)[:size]


def all_sum(tree: PyTree, axis_name: Any) -> PyTree:
    """Sum over the devices, by one all-reduce for each dtype: half the time of one per leaf."""
    if axis_name is None:
        return tree
    tree = jax.tree.map(lambda x: x[None], tree)
    return _by_dtype(lambda x: jax.lax.psum(x[0], axis_name), tree)


def _by_dtype(function: Callable[[Array], Array], tree: PyTree) -> PyTree:
    """`function`, [A, P] to [P], of all leaves [A, ...] of a dtype side by side."""
    leaves, structure = jax.tree.flatten(tree)
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        which = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        flat = [leaves[i].reshape(leaves[i].shape[0], -1) for i in which]
        ends = np.cumsum([x.shape[1] for x in flat])
        parts = jnp.split(function(jnp.concatenate(flat, axis=1)), ends[:-1])
        for i, part in zip(which, parts):
            leaves[i] = part.reshape(leaves[i].shape[1:])
    return jax.tree.unflatten(structure, leaves)


def gather_actors(tree: PyTree, *, axis_name: Any = None) -> PyTree:
    """Leaves [A, ...] of all devices, in the order of the actors."""
    if axis_name is None:
        return tree
    return replicate(jax.lax.all_gather(tree, axis_name, tiled=True), axis_name)


def adds_over_rows(loss: Any) -> Any:
    """Mark a loss that is a plain sum over the rows of its batch, so that they may be split.

    On a CPU the gradient of a large batch is then taken some rows at a time, about 2 × faster. What
    looks at all rows at once, such as a normalisation, belongs before such a loss.
    """
    loss.adds_over_rows = True
    return loss


def chunk_rows(num_rows: int) -> int | None:
    """How many of a batch's rows a CPU takes at a time; None: all of them.

    Example:
      >>> chunk_rows(128) is None
      True
    """
    if num_rows < 2 * CHUNK_ROWS:
        return None
    rows = max(n for n in range(1, CHUNK_ROWS + 1) if num_rows % n == 0)
    return rows if rows >= CHUNK_ROWS // 4 else None


def gradient(
    loss: Loss,
    params: PyTree,
    batches: Any,
    *,
    axis_name: Any = None,
    reduction: Reduction = "fast",
    mean: bool = True,
    split_rows: bool = False,
) -> tuple[PyTree, PyTree]:
    """Gradient of a loss over the batches of all actors, and the metrics' sums.

    Args:
      loss: (params, batch) -> (Σ w·ℓ, Σ w, metrics), metrics being any pytree of sums.
      params: what to differentiate by.
      batches: leaves [A, ...], one batch for each local actor.
      axis_name: mesh axis of the other devices.
      reduction: "fast" or "exact".
      mean: divide by Σ w over all actors; False where the algorithm's losses are sums.
      split_rows: the loss adds over rows, leaves are [A, N, ...]: take a few rows at a time.

    Returns:
      (gradient, metrics), the same on every device. Where the loss is not finite, neither is the
      gradient: of a selection such as `where(allowed, logits, -inf)` it would be, and be applied.
    """

    def total(params: PyTree, batch: Any) -> tuple[Array, tuple[Array, Array, PyTree]]:
        value, weight, metrics = loss(params, batch)
        return value, (value, weight, metrics)

    if axis_name is not None:
        # The gradient by params that do not vary would already be summed over the devices.
        params = vary_as(params, like=jax.lax.axis_index(axis_name))
    grad = jax.grad(total, has_aux=True)
    count = jax.tree.leaves(batches)[0].shape[0]

    def one(batch: Any) -> Any:
        """The gradient over leaves [N, ...], and what comes with it."""
        rows = chunk_rows(jax.tree.leaves(batch)[0].shape[0]) if split_rows else None
        if rows is None:
            return grad(params, batch)
        return jax.lax.platform_dependent(
            params,
            batch,
            cpu=lambda params, batch: _sum_of_chunks(grad, params, batch, rows),
            default=lambda params, batch: vary_as(grad(params, batch), like=(params, batch)),
        )

    if reduction == "exact":
        stacked = map_actors(one, batches, reduction=reduction)
        summed, aux = sum_actors(stacked, axis_name=axis_name, reduction=reduction)
    else:
        if count == 1:
            summed, aux = one(jax.tree.map(lambda x: x[0], batches))
        elif split_rows:  # rows that only add up need not know their actor
            summed, aux = one(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches))
        else:

            def all_actors(params: PyTree) -> tuple[Array, Any]:
                values, aux = jax.vmap(total, in_axes=(None, 0))(params, batches)
                return jnp.sum(values), jax.tree.map(lambda x: jnp.sum(x, 0, dtype=x.dtype), aux)

            summed, aux = jax.grad(all_actors, has_aux=True)(params)
        summed, aux = all_sum((summed, aux), axis_name)
    value, weight, metrics = aux
    scale = 1.0 / jnp.where(weight > 0, weight, 1) if mean else 1.0
    scale = jnp.where(jnp.isfinite(value), scale, jnp.nan)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), summed), metrics


def _sum_of_chunks(grad: Callable[..., Any], params: PyTree, batch: Any, rows: int) -> Any:
    """Σ grad(params, rows of the batch), so many rows at a time."""
    chunks = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), batch)
    shapes = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], chunks))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(
        lambda total, chunk: (jax.tree.map(jnp.add, total, grad(params, chunk)), None),
        vary_as(start, like=(params, batch)),
        chunks,
    )[0]


def apply_gradient(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, grads: PyTree
) -> tuple[PyTree, PyTree, Array]:
    """One optimiser step; a gradient that is not finite changes nothing.

    Returns:
      (params, opt_state, norm): the norm [] of the gradient before clipping, not finite if the
      step was left out.

    Example:
      >>> adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
      >>> params, grads = {"w": jnp.zeros(2)}, {"w": jnp.array([3.0, -4.0])}
      >>> params, _, norm = apply_gradient(adam, params, adam.init(params), grads)
      >>> params["w"].round(3), float(norm)
      (Array([-0.1,  0.1], dtype=float32), 5.0)
    """
    # Norm and guard on one vector: those of a dozen small leaves cost more than their work.
    norm = jnp.linalg.norm(ravel_pytree(grads)[0].astype(jnp.float32))
    is_finite = jnp.isfinite(norm)
    with jax.numpy_dtype_promotion("standard"):  # a user's strict setting is not for optax
        updates, new_state = optimizer.update(grads, opt_state, params)
    # Chosen number by number, without a branch: a branch on data makes the host wait on a GPU.
    flat, unravel = ravel_pytree(updates)
    params = optax.apply_updates(params, unravel(jnp.where(is_finite, flat, 0)))
    opt_state = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new_state, opt_state)
    return params, opt_state, norm


def nonfinite_leaves(grads: PyTree) -> Array:
    """[leaves] int32: 1 for each leaf of a gradient that makes its norm other than finite.

    All squares may be finite and their sum not: then the leaf of the largest is named.

    Example:
      >>> nonfinite_leaves({"b": jnp.zeros(2), "w": jnp.array([1.0, jnp.nan])})
      Array([0, 1], dtype=int32)
    """
    squares = jnp.stack(_squares(grads))
    bad = ~jnp.isfinite(squares)
    largest = jnp.arange(len(squares)) == jnp.argmax(squares)
    bad = jnp.where(jnp.any(bad), bad, largest & ~jnp.isfinite(jnp.sum(squares)))
    return bad.astype(jnp.int32)


def _squares(grads: PyTree) -> list[Array]:
    return [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]


def minibatch_updates(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    storages: Any,
    plans: MinibatchPlan,
    *,
    prepare: Callable[[Any], Any] | None = None,
    split_rows: bool = False,
    axis_name: Any = None,
    reduction: Reduction = "fast",
) -> tuple[PyTree, PyTree, PyTree, dict[str, Array]]:
    """Epochs × minibatches as one scan: minibatch i is the union of the actors' minibatches i.

    Args:
      loss: (params, minibatch) -> (Σ w·ℓ, Σ w, metrics).
      optimizer: an optax transformation.
      params: to train.
      opt_state: of the optimiser.
      storages: any storage with `minibatch(row)`, leaves [A, ...].
      plans: [A, E·M, N], one plan for each local actor.
      prepare: what is done to each actor's minibatch as a whole, before the loss.
      split_rows: the loss adds over rows; see `gradient`.
      axis_name: mesh axis of the other devices.
      reduction: "fast" or "exact".

    Returns:
      (params, opt_state, metrics, report): metrics have a leading axis [E·M]; the report is
      `grad_norm` [E·M], 0 for a step that was left out, and `nonfinite` [leaves] int32, how many
      steps were left out in each leaf that made the last of them not finite.
    """
    rows = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), plans)
    count = rows.indices.shape[1]

    def step(carry: tuple[PyTree, PyTree, Array], row: MinibatchPlan) -> tuple[Any, Any]:
        params, opt_state, refused = carry
        # Gathering is exact however it is batched; only arithmetic must go actor by actor.
        if count == 1:
            storage, row = jax.tree.map(lambda x: x[0], (storages, row))
            batches = jax.tree.map(lambda x: x[None], storage.minibatch(row))
        else:
            batches = jax.vmap(lambda storage, row: storage.minibatch(row))(storages, row)
        if prepare is not None:
            batches = map_actors(prepare, batches, reduction=reduction)
        grads, metrics = gradient(
            loss,
            params,
            batches,
            axis_name=axis_name,
            reduction=reduction,
            split_rows=split_rows,
        )
        params, opt_state, norm = apply_gradient(optimizer, params, opt_state, grads)
        refused = jnp.where(jnp.isfinite(norm), refused, ravel_pytree(grads)[0])
        return (params, opt_state, refused), (metrics, norm)

    none, unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, params))
    carry = (params, opt_state, none)
    (params, opt_state, refused), (metrics, norms) = jax.lax.scan(step, carry, rows)
    is_finite = jnp.isfinite(norms)
    report = {
        "grad_norm": jnp.where(is_finite, norms, 0),
        "nonfinite": nonfinite_leaves(unravel(refused)) * jnp.sum(~is_finite, dtype=jnp.int32),
    }
    return params, opt_state, metrics, report
