"""V-trace: value targets and policy-gradient advantages from another policy's experience.

Arrays are time-major, [T, B]; ends are as in `jaxroll.estimators.discounts`.
"""

from __future__ import annotations

from typing import Any

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
    rows = {
        "rhos": jnp.exp(log_rhos),
        "rewards": x.rewards,
        "values": x.values,
        "terminated": x.terminated,
        "truncated": x.truncated,
        "bootstrap_values": x.bootstrap_values,
        "discount": x.discount,
        "clip_rho": x.clip_rho,
        "valid": x.valid,
    }

    def error(row: Any, onward: Array) -> Array:
        """How far a reward and what follows it are from the value; 0 in a row not valid."""
        found = row.rewards + row.discount * onward - row.values
        return discounts.only_valid(row.valid, found, jnp.zeros_like(found))

    if _is_one_weight(clip_rho, clip_c, clip_pg_rho, trace_lambda):
        # gₜ = vₜ + ρₜ (rₜ + γ gₜ₊₁ − vₜ) and Aₜ = gₜ − vₜ: one carry, a third faster.
        def short(onward: Array, row: Any) -> tuple[Array, Targets]:
            rho = jnp.minimum(row.clip_rho, row.rhos)
            advantage = rho * error(row, discounts.after(onward, row))
            target = row.values + advantage
            return target, Targets(advantage, target)

        return discounts.backward(short, x.last_values, unroll=unroll, **rows)

    def step(onward: tuple[Array, Array], row: Any) -> tuple[tuple[Array, Array], Targets]:
        # onward is (v, v + λ (g − v)) of the next step; past an end both are the same value.
        value, mixed = (discounts.after(each, row) for each in onward)
        surprise = jnp.minimum(row.clip_rho, row.rhos) * error(row, value)
        surprise += row.discount * jnp.minimum(row.clip_c, row.rhos) * (mixed - value)
        advantage = jnp.minimum(row.clip_pg_rho, row.rhos) * error(row, mixed)
        carry = (row.values, row.values + row.trace * surprise)
        return carry, Targets(advantage, row.values + surprise)

    return discounts.backward(
        step,
        (x.last_values, x.last_values),
        unroll=unroll,
        clip_c=x.clip_c,
        clip_pg_rho=x.clip_pg_rho,
        trace=discounts.one_earlier(x.trace_lambda),
        **rows,
    )


def _is_one_weight(clip_rho: Any, clip_c: Any, clip_pg_rho: Any, trace_lambda: Any) -> bool:
    """Whether, already while tracing, all weights are known to be the same and λ to be 1."""

    def same(a: Any, b: Any) -> bool:
        return a is b or (isinstance(a, int | float) and isinstance(b, int | float) and a == b)

    return same(clip_rho, clip_c) and same(clip_rho, clip_pg_rho) and same(trace_lambda, 1.0)
