"""Kernels: estimators against rlax, brax, a widely copied scan, and the memory's own speed.

And distributions against distrax.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Ratio, Row, Settings, check_agreement, measure_kernels
from jax import Array, lax

from jaxroll import estimators
from jaxroll.distributions import Categorical, DiagonalGaussian

SHAPES = ((128, 8), (128, 1024), (128, 4096), (1024, 64), (2048, 8), (256, 16384))
NARROW = ((1024, 64), (2048, 8))  # many steps of few rows: the loop's own cost shows
DISCOUNT, LAMBDA = 0.99, 0.95
PUREJAXRL = "purejaxrl form"


def gae(settings: Settings) -> list[Row]:
    """Advantages and returns of every shape."""
    rows = []
    functions = gae_contenders()
    for shape in _shapes(settings):
        inputs = _rollout(shape)[:4]
        check_agreement(functions, inputs, [n for n in functions if n not in ("roofline", "brax")])
        returns = {n: lambda *x, f=functions[n]: f(*x)[1] for n in functions if n != "roofline"}
        check_agreement(returns, inputs, list(returns))
        ratios = [
            Ratio("jaxroll", "rlax", at_most=1.1),
            Ratio("jaxroll", "brax", at_most=1.1),
            Ratio(PUREJAXRL, "jaxroll", at_least=4),
            Ratio("jaxroll", "roofline", at_most=5 if shape in NARROW else 2.2),
        ]
        row = measure_kernels("gae", str(shape), functions, inputs, ratios, settings)
        if "brax" in functions:
            row.notes.append("brax's advantages leave λ out of their first hop; its returns agree")
        rows.append(row)
    return rows


def gae_contenders() -> dict[str, Any]:
    """Functions of (rewards, values, terminated [T, B], last_values [B])."""

    def jaxroll(rewards: Array, values: Array, terminated: Array, last_values: Array) -> Any:
        targets = estimators.gae(
            rewards, values, last_values, terminated, None, None, DISCOUNT, LAMBDA
        )
        return targets.advantages, targets.returns

    def purejaxrl(rewards: Array, values: Array, terminated: Array, last_values: Array) -> Any:
        def step(carry: Any, row: Any) -> Any:
            gae, next_value = carry
            reward, value, done = row
            delta = reward + DISCOUNT * next_value * (1 - done) - value
            gae = delta + DISCOUNT * LAMBDA * (1 - done) * gae
            return (gae, value), gae

        _, advantages = lax.scan(
            step,
            (jnp.zeros_like(last_values), last_values),
            (rewards, values, terminated),
            reverse=True,
            unroll=16,
        )
        return advantages, advantages + values

    def roofline(rewards: Array, values: Array, terminated: Array, last_values: Array) -> Any:
        advantages = rewards + DISCOUNT * jnp.where(terminated, 0, values)
        return advantages, advantages + values

    functions = {"jaxroll": jaxroll, PUREJAXRL: purejaxrl, "roofline": roofline}
    try:
        from brax.training.agents.ppo.losses import compute_gae
    except ImportError:
        pass
    else:

        def by_brax(rewards: Array, values: Array, terminated: Array, last_values: Array) -> Any:
            ended = terminated.astype(values.dtype)
            never = jnp.zeros_like(ended)
            returns, advantages = compute_gae(
                never, ended, rewards, values, last_values, LAMBDA, DISCOUNT
            )
            return advantages, returns

        functions["brax"] = by_brax
    try:
        import rlax
    except ImportError:
        return functions

    def by_rlax(rewards: Array, values: Array, terminated: Array, last_values: Array) -> Any:
        discounts = DISCOUNT * (1 - terminated)
        extended = jnp.concatenate([values, last_values[None]])
        advantages = jax.vmap(
            rlax.truncated_generalized_advantage_estimation, in_axes=(1, 1, None, 1), out_axes=1
        )(rewards, discounts, LAMBDA, extended)
        return advantages, advantages + values

    return {**functions, "rlax": by_rlax}


def vtrace(settings: Settings) -> list[Row]:
    """Targets and policy-gradient advantages, all thresholds 1 and general ones."""
    rows = []
    for name, thresholds in (
        ("all ones", {"clip_rho": 1.0, "clip_pg_rho": 1.0, "trace_lambda": 1.0}),
        ("general", {"clip_rho": 2.0, "clip_pg_rho": 1.5, "trace_lambda": 0.95}),
    ):
        functions = vtrace_contenders(**thresholds)
        for shape in _shapes(settings):
            inputs = _rollout(shape)
            check_agreement(functions, inputs, [n for n in functions if n != "roofline"])
            wide = shape[1] >= 1024
            ratios = [
                Ratio("rlax", "jaxroll", at_least=4 if wide else 1.2),
                Ratio("jaxroll", "roofline"),
            ]
            case = f"{shape} {name}"
            rows.append(measure_kernels("vtrace", case, functions, inputs, ratios, settings))
    return rows


def vtrace_contenders(
    *, clip_rho: float, clip_pg_rho: float, trace_lambda: float
) -> dict[str, Any]:
    """Functions of (rewards, values, terminated [T, B], last_values [B], log_rhos [T, B])."""

    def jaxroll(
        rewards: Array, values: Array, terminated: Array, last_values: Array, log_rhos: Array
    ) -> Any:
        targets = estimators.vtrace(
            log_rhos,
            rewards,
            values,
            last_values,
            terminated,
            None,
            None,
            DISCOUNT,
            clip_rho=clip_rho,
            clip_pg_rho=clip_pg_rho,
            trace_lambda=trace_lambda,
        )
        return targets.advantages, targets.returns

    def roofline(
        rewards: Array, values: Array, terminated: Array, last_values: Array, log_rhos: Array
    ) -> Any:
        advantages = rewards + jnp.exp(log_rhos) * jnp.where(terminated, 0, values)
        return advantages, advantages + values

    functions = {"jaxroll": jaxroll, "roofline": roofline}
    try:
        import rlax
    except ImportError:
        return functions

    def by_rlax(
        rewards: Array, values: Array, terminated: Array, last_values: Array, log_rhos: Array
    ) -> Any:
        following = jnp.concatenate([values[1:], last_values[None]])
        found = jax.vmap(
            lambda *rows: rlax.vtrace_td_error_and_advantage(
                *rows,
                lambda_=trace_lambda,
                clip_rho_threshold=clip_rho,
                clip_pg_rho_threshold=clip_pg_rho,
            ),
            in_axes=1,
            out_axes=1,
        )(values, following, rewards, DISCOUNT * (1 - terminated), jnp.exp(log_rhos))
        return found.pg_advantage, found.errors + values

    return {**functions, "rlax": by_rlax}


def distributions(settings: Settings) -> list[Row]:
    """What a learner asks of a distribution: log-probability, entropy, and their gradient."""
    rows = []
    count = 16 if settings.quick else 2048
    rng = np.random.default_rng(0)
    normal = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    cases: list[Any] = [
        (f"Categorical, {count} rows of 6", (normal(count, 6), jnp.zeros(count, jnp.int32))),
        (f"diagonal Gaussian, {count} rows of 6", (normal(count, 6), normal(count, 6))),
    ]
    for case, inputs in cases:
        functions = _learning_from(case.startswith("Categorical"))
        check_agreement(functions, inputs, list(functions))
        ratios = [Ratio("distrax", "jaxroll")]
        rows.append(measure_kernels("distributions", case, functions, inputs, ratios, settings))
    return rows


def _learning_from(categorical: bool) -> dict[str, Any]:
    """Functions of (parameters [N, K], actions): the sums, and the parameters' gradient."""
    makers: dict[str, Any] = {
        "jaxroll": Categorical
        if categorical
        else lambda mean: DiagonalGaussian(mean, jnp.zeros_like(mean))
    }
    try:
        import distrax
    except ImportError:
        pass
    else:
        makers["distrax"] = (
            distrax.Categorical
            if categorical
            else lambda mean: distrax.MultivariateNormalDiag(mean, jnp.ones_like(mean))
        )

    def learning(make: Any) -> Any:
        def loss(parameters: Array, action: Array) -> Array:
            distribution = make(parameters)
            return jnp.sum(distribution.log_prob(action)) + jnp.sum(distribution.entropy())

        return jax.value_and_grad(loss)

    return {name: learning(make) for name, make in makers.items()}


def _shapes(settings: Settings) -> tuple[tuple[int, int], ...]:
    return SHAPES[:1] if settings.quick else SHAPES


def _rollout(shape: tuple[int, int]) -> tuple[Array, ...]:
    """(rewards, values, terminated, last_values, log_rhos)."""
    rng = np.random.default_rng(0)
    normal = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    terminated = jnp.asarray(rng.random(shape) < 0.05)
    return normal(*shape), normal(*shape), terminated, normal(shape[1]), 0.3 * normal(*shape)
