"""V-trace: value targets and policy-gradient advantages from another policy's experience.

Arrays are time-major, [T, B]; ends are as in `jaxroll.estimators.discounts`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jaxroll.estimators import discounts
from jaxroll.types import Array, Targets


def vtrace(
    log_rhos: Array,
    rewards: Array,
    values: Array,
    last_values: Array,
    terminated: Array | None,
    truncated: Array | None,
    bootstrap_values: Array | None,
    discount: Array | float,
    *,
    clip_rho: Array | float = 1.0,
    clip_c: Array | float = 1.0,
    clip_pg_rho: Array | float = 1.0,
    trace_lambda: Array | float = 1.0,
    valid: Array | None = None,
    unroll: int = 1,
) -> Targets:
    """Off-policy corrected targets, with importance weights that are clipped from above.

        ρₜ = min(ρ̄, π(aₜ)/μ(aₜ)),  cₜ = λ min(c̄, π(aₜ)/μ(aₜ))
        gₜ = vₜ + ρₜ (rₜ + γ vₜ₊₁ − vₜ) + γ cₜ (gₜ₊₁ − vₜ₊₁)
        Aₜ = min(ρ̄_pg, π(aₜ)/μ(aₜ)) (rₜ + γ [λ gₜ₊₁ + (1 − λ) vₜ₊₁] − vₜ)

    On-policy (all ratios 1) g is the λ-return and A its advantage.

    Args:
      log_rhos: [T, B] log π(aₜ) − log μ(aₜ), the learner's policy over the actor's.
      rewards: [T, B].
      values: [T, B] V(obs[t]) of the learner.
      last_values: [B] value of the observation after the last step.
      terminated: [T, B] the successor is worth 0.
      truncated: [T, B] or None.
      bootstrap_values: [T, B] V(final observation), read only where truncated.
      discount: γ, a scalar or [T, B].
      clip_rho: ρ̄, decides what the values converge to; `jnp.inf` does not clip.
      clip_c: c̄, how far a surprise is passed back.
      clip_pg_rho: ρ̄_pg, clips the policy gradient's weight.
      trace_lambda: λ, a scalar or [T, B]; λₜ weighs what follows step t.
      valid: [T, B] False where a row is no experience: advantage 0, return = its value.
      unroll: of the scan; 1 is fastest on CPU.

    Returns:
      Targets: [T, B] returns (value targets g) and [T, B] advantages (for the policy gradient).

    Example:
      >>> r, v = jnp.ones((2, 1)), jnp.zeros((2, 1))
      >>> vtrace(v, r, v, jnp.zeros(1), None, None, None, 0.5).returns[:, 0].tolist()
      [1.5, 1.0]

    Espeholt et al., 2018, https://arxiv.org/abs/1802.01561
    """
    x = discounts.prepare(
        rewards=rewards,
        values=values,
        log_rhos=log_rhos,
        last_values=last_values,
        terminated=terminated,
        truncated=truncated,
        bootstrap_values=bootstrap_values,
        valid=valid,
        numbers={
            "discount": discount,
            "clip_rho": clip_rho,
            "clip_c": clip_c,
            "clip_pg_rho": clip_pg_rho,
            "trace_lambda": trace_lambda,
        },
    )

    # An invalid row's ratio may be anything; 0 keeps its gradient finite too.
    log_rhos = discounts.only_valid(x.valid, x.log_rhos, jnp.zeros_like(x.log_rhos))
    rows = SimpleNamespace(**{**vars(x), "rhos": jnp.exp(log_rhos)})

    def surprise(row: Any, error: Array, behind: Array) -> Array:
        """g − v of a step, from its error and the next step's g − v."""
        passed = row.discount * row.trace_lambda * jnp.minimum(row.clip_c, row.rhos)
        return jnp.minimum(row.clip_rho, row.rhos) * error + passed * behind

    def advantage(row: Any, error: Array, behind: Array) -> Array:
        weight = jnp.minimum(row.clip_pg_rho, row.rhos)
        return weight * (error + row.discount * row.trace_lambda * behind)

    if not discounts.goes_by_rows(x.rewards):
        # What does not need the walk is computed for all rows at once; the barrier has errors,
        # which both need, computed once.
        errors = discounts.errors(x, discounts.following(x.values, x.last_values))
        rows.errors, rows.ended = jax.lax.optimization_barrier(errors), discounts.has_ended(x)

        def walk(onward: Array, row: Any) -> tuple[Array, Array]:
            found = surprise(row, row.errors, discounts.nothing_behind(onward, row.ended))
            return found, found

        zero = jnp.zeros_like(x.last_values)
        needed = ("errors", "ended", "rhos", "discount", "trace_lambda", "clip_c", "clip_rho")
        inputs = {name: getattr(rows, name) for name in needed}
        surprises = discounts.backward(walk, zero, unroll=unroll, **inputs)
        behind = discounts.nothing_behind(discounts.following(surprises, zero), rows.ended)
        return Targets(advantage(rows, rows.errors, behind), x.values + surprises)

    def step(onward: tuple[Array, Array], row: Any) -> tuple[tuple[Array, Array], Targets]:
        value, behind = onward
        error = discounts.errors(row, value)
        behind = discounts.nothing_behind(behind, discounts.has_ended(row))
        found = surprise(row, error, behind)
        return (row.values, found), Targets(advantage(row, error, behind), row.values + found)

    last = (x.last_values, jnp.zeros_like(x.last_values))
    del rows.last_values  # no row
    return discounts.backward(step, last, unroll=unroll, **vars(rows))
