"""V-trace: value targets and policy-gradient advantages from another policy's experience.

Arrays are time-major, [T, B]; ends are as in `jaxroll.estimators.discounts`.
"""

from __future__ import annotations

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
    decay = x.discount * x.trace_lambda
    errors = discounts.errors(x, discounts.following(x.values, x.last_values))
    # The barrier has both computed once: the walk and the advantages need them.
    errors, rhos = jax.lax.optimization_barrier((errors, jnp.exp(log_rhos)))
    surprises = discounts.decayed_sums(  # g − v
        jnp.minimum(x.clip_rho, rhos) * errors,
        decay,
        x,
        ratios=rhos,
        bound=x.clip_c,
        unroll=unroll,
    )
    behind = discounts.following(surprises, jnp.zeros_like(x.last_values))
    behind = discounts.nothing_behind(behind, discounts.has_ended(x))
    advantages = jnp.minimum(x.clip_pg_rho, rhos) * (errors + decay * behind)
    return Targets(advantages, x.values + surprises)
