"""V-trace: value targets and policy-gradient advantages from another policy's experience.

Arrays are time-major, [T, B]; ends are as in `jaxroll.estimators.bootstrap`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxroll.estimators.bootstrap import (
    check_steps,
    discounted_cumsum,
    next_values,
    shift,
    td_errors,
)
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
) -> Targets:
    """Off-policy corrected targets, with importance weights that are clipped from above.

        ρₜ = min(ρ̄, π(aₜ)/μ(aₜ)),  cₜ = λ min(c̄, π(aₜ)/μ(aₜ))
        gₜ = vₜ + ρₜ (rₜ + γ vₜ₊₁ − vₜ) + γ cₜ (gₜ₊₁ − vₜ₊₁)
        Aₜ = min(ρ̄_pg, π(aₜ)/μ(aₜ)) (rₜ + γ [λ gₜ₊₁ + (1 − λ) vₜ₊₁] − vₜ)

    On-policy (all ratios 1) g is the λ-return and A its advantage.

    Args:
      log_rhos: [T, B] log π(aₜ) − log μ(aₜ), the learner's policy over the actor's.
      rewards, values, last_values, terminated, truncated, bootstrap_values, discount: as in
        `jaxroll.gae`, values of the learner.
      clip_rho: ρ̄, decides what the values converge to; `jnp.inf` does not clip.
      clip_c: c̄, how far an error is passed back.
      clip_pg_rho: ρ̄_pg, clips the policy gradient's weight.
      trace_lambda: λ, a scalar or [T, B]; λₜ weighs what follows step t.
      valid: [T, B] False where a row is not experience: advantage 0, return = its value.

    Returns:
      Targets: [T, B] returns (value targets g) and [T, B] advantages (for the policy gradient).

    Example:
      >>> r, v = jnp.ones((2, 1)), jnp.zeros((2, 1))
      >>> vtrace(v, r, v, jnp.zeros(1), None, None, None, 0.5).returns[:, 0].tolist()
      [1.5, 1.0]

    Espeholt et al., 2018, https://arxiv.org/abs/1802.01561
    """
    steps = check_steps(
        rewards, values, last_values, terminated, truncated, bootstrap_values, valid
    )
    log_rhos = steps.array("log_rhos", log_rhos)
    discount = steps.number("discount", discount)
    decay = discount * steps.number("trace_lambda", trace_lambda)
    clip_rho = steps.number("clip_rho", clip_rho, "> 0", finite=False)
    clip_c = steps.number("clip_c", clip_c, "> 0", finite=False)
    clip_pg_rho = steps.number("clip_pg_rho", clip_pg_rho, "> 0", finite=False)

    log_rhos = steps.where_valid(log_rhos)  # what is anything elsewhere has no gradient either
    following, continues = next_values(steps)
    # The barrier has both computed once: the sums and the advantages need them.
    errors, rhos = jax.lax.optimization_barrier(
        (td_errors(steps, discount, following), jnp.exp(log_rhos))
    )
    vtrace_errors = discounted_cumsum(  # g − v
        jnp.minimum(clip_rho, rhos) * errors, decay * jnp.minimum(clip_c, rhos), continues
    )
    next_errors = shift(vtrace_errors, jnp.zeros_like(steps.last_values))
    advantages = errors + decay * jnp.where(continues, next_errors, 0)
    return Targets(jnp.minimum(clip_pg_rho, rhos) * advantages, steps.values + vtrace_errors)
