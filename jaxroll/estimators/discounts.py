"""How an episode ends: the one place that knows what bootstraps and what cuts the trace.

Every estimator is a walk backwards over time that carries one small row: what stands after
the step. `terminated` makes that 0, `truncated` makes it V(final observation); either way
nothing from behind the end comes through, so both cut the trace. With neither it is what the
walk carries, which starts as `last_values`. Where both flags are set, `terminated` wins.

Choices are made with `where`, never by multiplying, so that a NaN in a place that is not
used (the bootstrap value of a step that was not truncated, a row that is not valid) stays there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jaxroll.types import Array


def after(onward: Array, row: Any) -> Array:
    """What stands after a step: 0 if terminated, V(final observation) if truncated, else onward.

    Args:
      onward: [B] what the backward walk carries.
      row: has `terminated` [B], `truncated` [B], `bootstrap_values` [B] and `valid` [B]; None:
        never so (`valid`: always).

    Returns:
      [B] the value of the successor; multiply by the discount and add to the reward. It is 0
      in a row that is not valid, so that nothing there reaches a gradient either.
    """
    if row.truncated is not None:
        onward = jnp.where(row.truncated, row.bootstrap_values, onward)
    if row.terminated is not None:
        onward = jnp.where(row.terminated, jnp.zeros_like(onward), onward)
    return only_valid(row.valid, onward, jnp.zeros_like(onward))


def only_valid(valid: Array | None, x: Array, otherwise: Array) -> Array:
    """`x` where the row is valid (or where all are), `otherwise` elsewhere."""
    return x if valid is None else jnp.where(valid, x, otherwise)


def has_ended(row: Any) -> Array | None:
    """Whether what follows a step belongs to something else; None: never.

    So it is where an episode ended, and in a row that is not valid.
    """
    found = None
    for flag in (row.terminated, row.truncated, None if row.valid is None else ~row.valid):
        if flag is not None:
            found = flag if found is None else found | flag
    return found


def following(x: Array, last: Array) -> Array:
    """[T, B] what the next row holds, `last` [B] after the last one."""
    return jnp.concatenate([x[1:], last[None]])


def nothing_behind(onward: Array, ended: Array | None) -> Array:
    """`onward`, or 0 where a step has ended."""
    return onward if ended is None else jnp.where(ended, jnp.zeros_like(onward), onward)


def errors(row: Any, following: Array) -> Array:
    """δ = r + γ v' − v: how far a reward and what follows it are from the value.

    Args:
      row: has `rewards`, `values`, `discount`, and what `after` needs; rows [B] or all, [T, B].
      following: the value of the next row, of the same shape.

    Returns:
      δ; 0 where a row is not valid.
    """
    found = row.rewards + row.discount * after(following, row) - row.values
    return only_valid(row.valid, found, jnp.zeros_like(found))


def decayed_sums(
    x: Array,
    decay: Array,
    rows: Any,
    *,
    ratios: Array | None = None,
    bound: Array | None = None,
    unroll: int,
) -> Array:
    """Sums to the end of each episode: sₜ = xₜ + decayₜ sₜ₊₁, and sₜ₊₁ = 0 behind an end.

    What does not depend on s is computed before, for all rows at once: only one product and one
    sum are left for the walk, which writes s over x, so that no further array is touched.

    Args:
      x: [T, B].
      decay: a scalar or [T, B].
      rows: has `terminated`, `truncated` and `valid`, [T, B] or None.
      ratios: [T, B] by which decay is multiplied as well; None: by none.
      bound: a scalar or [T, B], with ratios: no ratio counts for more.
      unroll: passed to `jax.lax.scan`; at 1 the walk is done in place.

    Returns:
      [T, B].
    """
    walk = _sums_in_place if unroll == 1 else functools.partial(_scanned_sums, unroll=unroll)
    return walk(x, {"decay": decay, "ratios": ratios, "bound": bound, "ended": has_ended(rows)})


def _next_sum(x: Array, row: dict[str, Any], onward: Array) -> Array:
    decay = row["decay"]
    if row["ratios"] is not None:
        decay = decay * jnp.minimum(row["bound"], row["ratios"])
    return x + decay * nothing_behind(onward, row["ended"])


def _scanned_sums(x: Array, rows: dict[str, Any], *, unroll: int = 1) -> Array:
    def step(onward: Array, row: Any) -> tuple[Array, Array]:
        total = _next_sum(row.x, vars(row), onward)
        return total, total

    # zeros_like of data, not zeros: under shard_map a carry must vary as its data do.
    return backward(step, jnp.zeros_like(x[-1]), unroll=unroll, x=x, **rows)


@jax.custom_jvp
def _sums_in_place(x: Array, rows: dict[str, Any]) -> Array:
    """`_scanned_sums` without an array of its own for the result."""
    num_steps = x.shape[0]

    def at(x: Any, t: Array) -> Any:
        if jnp.ndim(x) == 0:
            return x
        return jax.lax.dynamic_index_in_dim(x, t, keepdims=False, allow_negative_indices=False)

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        sums, onward = carry
        t = num_steps - 1 - i
        total = _next_sum(at(sums, t), jax.tree.map(lambda x: at(x, t), rows), onward)
        put = jax.lax.dynamic_update_index_in_dim
        return put(sums, total, t, 0, allow_negative_indices=False), total

    return jax.lax.fori_loop(0, num_steps, step, (x, jnp.zeros_like(x[-1])))[0]


@_sums_in_place.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """By the scan: the gradient of a walk in place would copy the array at every step."""
    return jax.jvp(_scanned_sums, primals, tangents)


def backward(
    step: Callable[[Any, Any], tuple[Any, Any]], last: Any, *, unroll: int, **rows: Any
) -> Any:
    """Walk from the last step to the first; `step(carry, row) -> (carry, output)`.

    A plain reverse scan with unroll 1 is the fastest form on CPU; `unroll` is for accelerators.

    Args:
      step: gets one row of each of `rows`, as attributes; scalars and None as they are.
      last: the carry that stands after the last step.
      unroll: passed to `jax.lax.scan`.
      **rows: [T, B] arrays, scalars or None.

    Returns:
      the outputs, [T, B].
    """
    fixed = {name: x for name, x in rows.items() if x is None or jnp.ndim(x) == 0}
    moving = {name: x for name, x in rows.items() if name not in fixed}

    def body(carry: Any, row: dict[str, Any]) -> tuple[Any, Any]:
        return step(carry, SimpleNamespace(**fixed, **row))

    return jax.lax.scan(body, last, moving, reverse=True, unroll=unroll)[1]


def one_earlier(x: Array) -> Array:
    """A [T, B] weight moved one step back in time: row t gets what belongs to t − 1.

    A weight λₜ of what follows step t is applied where the walk leaves step t + 1. A scalar is
    the same everywhere and stays as it is.
    """
    return x if jnp.ndim(x) == 0 else jnp.concatenate([x[:1], x[:-1]])


def prepare(
    *,
    rewards: Array,
    last_values: Array,
    terminated: Array | None,
    truncated: Array | None,
    bootstrap_values: Array | None,
    valid: Array | None,
    numbers: dict[str, Any],
    **arrays: Array,
) -> SimpleNamespace:
    """Check the shapes, and give every float the dtype of the values.

    Args:
      rewards: [T, B]; its shape rules.
      last_values: [B].
      terminated: [T, B] or None; so are truncated, bootstrap_values and valid.
      numbers: discount and the like: scalars or [T, B].
      **arrays: [T, B] floats; the first gives the dtype (last_values if there is none).

    Returns:
      all of them by name, ready for `backward`.
    """
    rewards = jnp.asarray(rewards)
    if rewards.ndim < 1:
        raise ValueError(
            "rewards must be time-major, [T, B] (or [T] for one environment), got a scalar. "
            "Write rewards[None] for a single step."
        )
    shape = rewards.shape
    if truncated is not None and bootstrap_values is None:
        raise ValueError(
            "truncated needs bootstrap_values, V(final observation) of each truncated step: the "
            "observation of the next row belongs to the next episode, so its value must not be "
            "used. Give bootstrap_values=[T, B] (read only where truncated), or truncated=None if "
            "no episode is cut short."
        )
    if truncated is None:
        bootstrap_values = None
    first = next(iter(arrays.values())) if arrays else last_values
    dtype = jnp.result_type(first)
    if not jnp.issubdtype(dtype, jnp.floating):
        name = next(iter(arrays), "last_values")
        raise TypeError(
            f"{name} must be floating point, got {dtype}. Use {name}.astype(jnp.float32)."
        )

    def check(name: str, x: Any, expected: tuple[int, ...]) -> Any:
        if jnp.shape(x) != expected:
            raise ValueError(
                f"{name} must have the shape {list(expected)} (rewards are {list(shape)}, "
                f"time first), got {list(jnp.shape(x))}."
            )
        return x

    def flag(name: str, x: Any) -> Any:
        if x is None:
            return None
        x = jnp.asarray(check(name, x, shape))
        return x if x.dtype == bool else x != 0

    def number(name: str, x: Any) -> Array:
        if jnp.ndim(x) > 0 and jnp.shape(x) != shape:
            raise ValueError(
                f"{name} must be a scalar or have the shape of rewards, {list(shape)}, got "
                f"{list(jnp.shape(x))}. Use jnp.broadcast_to({name}, rewards.shape)."
            )
        return jnp.asarray(x, dtype)

    out = {name: jnp.asarray(check(name, x, shape), dtype) for name, x in arrays.items()}
    out |= {name: number(name, x) for name, x in numbers.items()}
    if bootstrap_values is not None:
        bootstrap_values = jnp.asarray(check("bootstrap_values", bootstrap_values, shape), dtype)
    rewards = rewards.astype(dtype)
    last_values = jnp.asarray(check("last_values", last_values, shape[1:]), dtype)
    return SimpleNamespace(
        rewards=rewards,
        # Inside shard_map a constant would not vary over the mesh as the carry of a scan must.
        last_values=last_values + jnp.zeros_like(rewards[-1]),
        terminated=flag("terminated", terminated),
        truncated=flag("truncated", truncated),
        bootstrap_values=bootstrap_values,
        valid=flag("valid", valid),
        **out,
    )
