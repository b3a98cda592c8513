"""What an estimator bootstraps from, and the one sum over time that all estimators share.

`next_values` is the only place that knows how an episode ends. A terminated step is followed by
the value 0, a truncated one by V(final observation); both cut the trace, and where both flags are
set `terminated` wins. Any other step is followed by the value of the next row, the last one by
`last_values`.

Choices are made with `where`, never by multiplying, so that a NaN in a place that is not used (the
bootstrap value of a step that was not truncated, a row that is not valid) stays there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxroll.checks import check_array, check_number
from jaxroll.types import Array
from jaxroll.varying import vary_as

Element = tuple[Array, Array, Array]  # (decay, sum, continues) of one or more steps


class Steps(NamedTuple):
    """The arguments that all estimators share, checked, and of one dtype."""

    rewards: jax.Array  # [T, B]
    values: jax.Array  # [T, B]; zeros for estimators without values
    last_values: jax.Array  # [B]
    terminated: jax.Array | None  # [T, B] bool
    truncated: jax.Array | None  # [T, B] bool
    bootstrap_values: jax.Array | None  # [T, B]; None if truncated is
    valid: jax.Array | None  # [T, B] bool

    def array(self, name: str, x: Array) -> jax.Array:
        """A further [T, B] argument, in the dtype of the values."""
        return jnp.asarray(check_array(name, x, self.rewards.shape, " of rewards")).astype(
            self.values.dtype
        )

    def where_valid(self, x: jax.Array, other: Array | float = 0) -> jax.Array:
        """x, and `other` where a row is not valid."""
        return x if self.valid is None else jnp.where(self.valid, x, other)

    def number(
        self, name: str, x: Array | float, rule: str = "in [0, 1]", *, finite: bool = True
    ) -> jax.Array:
        """A number that is a scalar or [T, B], in the dtype of the values."""
        shape = self.rewards.shape
        check_number(name, x, rule, finite=finite, shape=None)
        if jnp.shape(x) not in ((), shape):
            raise ValueError(
                f"{name} must be a scalar or have the shape of rewards, {list(shape)}, got "
                f"{list(jnp.shape(x))}. Use jnp.broadcast_to({name}, rewards.shape)."
            )
        return jnp.asarray(x).astype(self.values.dtype)


def check_steps(
    rewards: Array,
    values: Array | None,
    last_values: Array,
    terminated: Array | None,
    truncated: Array | None,
    bootstrap_values: Array | None,
    valid: Array | None,
    *,
    name: str | None = "values",
) -> Steps:
    """Check the shapes against that of the rewards, and give every float the values' dtype.

    `name` is what to call `values` in an error; None: there are none, and zeros take their place.
    """
    rewards = jnp.asarray(check_array("rewards", rewards))
    shape = rewards.shape
    if not shape:
        raise ValueError(
            "rewards must be time-major, [T, B] (or [T] for one environment), got a scalar. "
            "Write rewards[None] for a single step."
        )
    why = f" (rewards are {list(shape)}, time first)"
    if truncated is not None and bootstrap_values is None:
        raise ValueError(
            "truncated needs bootstrap_values [T, B], V(final observation) of each truncated step: "
            "the observation of the next row belongs to the next episode. Give both, or "
            "truncated=None if no episode is cut short."
        )
    last_values = jnp.asarray(check_array("last_values", last_values, shape[1:], why))
    if name is None:
        name, values = "last_values", jnp.zeros(shape, last_values.dtype)
    values = jnp.asarray(check_array(name, values, shape, why))
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be floating point, got {values.dtype}. Use {name}.astype(jnp.float32)."
        )

    def flags(name: str, x: Array | None) -> jax.Array | None:
        return None if x is None else jnp.asarray(check_array(name, x, shape, why)).astype(bool)

    steps = Steps(
        rewards=rewards.astype(values.dtype),
        values=values,
        last_values=last_values.astype(values.dtype),
        terminated=flags("terminated", terminated),
        truncated=flags("truncated", truncated),
        bootstrap_values=None,
        valid=flags("valid", valid),
    )
    if bootstrap_values is None or truncated is None:
        return steps
    return steps._replace(bootstrap_values=steps.array("bootstrap_values", bootstrap_values))


def next_values(steps: Steps) -> tuple[jax.Array, jax.Array]:
    """The value of each step's successor, and whether the trace goes on to it.

    Returns:
      ([T, B] next values, [T, B] bool continues): 0 and False where terminated, V(final
      observation) and False where truncated, and 0 and False in a row that is not valid.
    """
    values = shift(steps.values, steps.last_values)
    continues = jnp.ones(values.shape, bool)
    if steps.truncated is not None and steps.bootstrap_values is not None:
        values = jnp.where(steps.truncated, steps.bootstrap_values, values)
        continues &= ~steps.truncated
    for ended in (steps.terminated, None if steps.valid is None else ~steps.valid):
        if ended is not None:
            values = jnp.where(ended, 0, values)
            continues &= ~ended
    return values, continues


def td_errors(steps: Steps, discount: Array, next_values: Array) -> jax.Array:
    """δₜ = rₜ + γ vₜ₊₁ − vₜ, [T, B]; 0 where a row is not valid."""
    return steps.where_valid(steps.rewards + discount * next_values - steps.values)


def shift(x: Array, last: Array) -> jax.Array:
    """[T, B] the next row of each, `last` [B] after the last one."""
    return jnp.concatenate([x[1:], last[None]])


def discounted_cumsum(x: Array, decay: Array, continues: Array) -> jax.Array:
    """Sums backwards over time that start anew wherever the trace is cut.

        sₜ = xₜ + decayₜ sₜ₊₁    (xₜ where the trace does not continue)

    One pass in place on a CPU; elsewhere an associative scan of about 2 log₂ T operations, since
    a loop of T steps would launch T kernels.

    Args:
      x: [T, B].
      decay: a scalar or [T, B].
      continues: [T, B] bool; False: nothing after step t counts. The last row has no successor.

    Returns:
      [T, B].

    Example:
      >>> x, goes_on = jnp.ones((4, 1)), jnp.array([[True], [False], [True], [True]])
      >>> discounted_cumsum(x, jnp.float32(0.5), goes_on)[:, 0].tolist()
      [1.5, 1.0, 1.5, 1.0]
    """
    x, decay, continues = vary_as((x, decay, continues), (x, decay, continues))
    return lax.platform_dependent(
        x, decay, continues, cpu=cumsum_in_place, default=associative_cumsum
    )


def associative_cumsum(x: Array, decay: Array, continues: Array) -> jax.Array:
    """`discounted_cumsum` for accelerators."""
    elements = (jnp.broadcast_to(decay, x.shape), x, continues)
    # A reversed scan gives its function the later element first.
    scan = lax.associative_scan(lambda later, earlier: join(earlier, later), elements, reverse=True)
    return scan[1]


def join(earlier: Element, later: Element) -> Element:
    """Two neighbouring stretches of time as one: s ↦ x₁ + d₁ (x₂ + d₂ s), cut where one is."""
    decay, total, continues = earlier
    # Chosen before the product: a NaN behind a cut stays there.
    after_decay = jnp.where(continues, later[0], 0)
    after_total = jnp.where(continues, later[1], 0)
    return decay * after_decay, total + decay * after_total, continues & later[2]


@jax.custom_jvp
def cumsum_in_place(x: Array, decay: Array, continues: Array) -> jax.Array:
    """`discounted_cumsum` for CPUs: the sums are written over x, so no further array is touched."""
    num_steps = x.shape[0]

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        sums, after = carry
        t = num_steps - 1 - i
        at = [
            lax.dynamic_index_in_dim(y, t, keepdims=False, allow_negative_indices=False)
            if jnp.ndim(y)
            else y
            for y in (sums, decay, continues)
        ]
        after = at[0] + at[1] * jnp.where(at[2], after, 0)
        sums = lax.dynamic_update_index_in_dim(sums, after, t, 0, allow_negative_indices=False)
        return sums, after

    return lax.fori_loop(0, num_steps, step, (x, jnp.zeros_like(x[-1])))[0]


@cumsum_in_place.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """By a scan: the gradient of a loop in place would copy the array at every step.

    The sums themselves stay those in place: under vmap, the rule must batch along the same axis.
    """
    return cumsum_in_place(*primals), jax.jvp(_scanned_cumsum, primals, tangents)[1]


def _scanned_cumsum(x: Array, decay: Array, continues: Array) -> jax.Array:
    def step(after: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        total = row[0] + row[1] * jnp.where(row[2], after, 0)
        return total, total

    rows = (x, jnp.broadcast_to(decay, x.shape), continues)
    return lax.scan(step, jnp.zeros_like(x[-1]), rows, reverse=True)[1]
