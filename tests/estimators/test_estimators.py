"""Every estimator against its explicit sums, rlax, hand-worked numbers and the others."""

import functools

import estimator_reference as reference
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from estimator_calls import (
    NAMES,
    assert_same,
    call,
    clean_case,
    each_kind,
    expected,
    float32,
)
from hypothesis import given, settings, strategies as st

import jaxroll

# Against the formulas.


@each_kind
@pytest.mark.parametrize("per_row", [False, True])
def test_equals_the_explicit_sum_of_each_episode(name, options, per_row):
    run = jax.jit(lambda case: call(name, case, **options))
    for seed in range(8):
        case = reference.random_case(np.random.default_rng(seed), 11, 6, per_row=per_row)
        assert_same(run(float32(case)), expected(name, case, **options))


@each_kind
def test_eager_equals_jit(name, options):
    case = float32(reference.random_case(np.random.default_rng(3), 5, 3))
    assert_same(
        call(name, case, **options), jax.jit(lambda c: call(name, c, **options))(case), atol=1e-6
    )


@functools.cache
def compiled(name, form):
    options = {"n": 2} if name == "n_step_returns" else {}
    return jax.jit(lambda case: call(name, case, **options)), options


@st.composite
def cases(draw):
    shape = draw(st.sampled_from([(1, 1), (2, 3), (6, 2)]))  # few shapes: few compilations
    case = reference.random_case(np.random.default_rng(draw(st.integers(0, 999))), *shape)
    for flag in ("terminated", "truncated", "valid"):
        case[flag] = draw(hnp.arrays(bool, shape))
    floats = draw(hnp.arrays(np.float32, (3, *shape), elements=st.floats(-8, 8, width=32)))
    case["rewards"], case["values"], case["bootstrap_values"] = floats.astype(np.float64)
    for name in ("last_values", "log_rhos", "q_values", "expected_values"):
        case[name] = np.nan_to_num(case[name])
    return reference.with_nan_where_unused(case)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_any_flags_on_any_shape(form, name, case):
    run, options = compiled(name, form)
    assert_same(run(float32(case)), expected(name, case, **options), rtol=1e-4, atol=1e-4)


# Against rlax, which knows terminations only: a truncated step becomes a terminated one whose
# reward already has the bootstrap value in it.


def folded(case):
    cut = case["truncated"] & ~case["terminated"]
    gamma = np.broadcast_to(case["discount"], case["rewards"].shape)
    return float32(
        {
            **case,
            "rewards": case["rewards"] + np.where(cut, gamma * case["bootstrap_values"], 0),
            "discount": np.where(case["terminated"] | case["truncated"], 0, gamma),
            "last_values": np.nan_to_num(case["last_values"]),
        }
    )


def over_envs(fun, *args):
    return jax.vmap(fun, in_axes=1, out_axes=1)(*args)


def test_gae_equals_rlax():
    case = clean_case(per_row=False)
    x = folded(case)
    values = np.concatenate([x["values"], x["last_values"][None]])
    want = over_envs(
        lambda r, g, v: rlax.truncated_generalized_advantage_estimation(r, g, 0.7, v),
        x["rewards"],
        x["discount"],
        values,
    )
    assert_same(call("gae", float32(case))[:1], (want,))


def test_returns_equal_rlax():
    case = clean_case(1, per_row=False)
    x = folded(case)
    v_next = np.concatenate([x["values"][1:], x["last_values"][None]])
    args = (x["rewards"], x["discount"], v_next)
    want = over_envs(lambda r, g, v: rlax.lambda_returns(r, g, v, 0.7), *args)
    assert_same(call("lambda_returns", float32(case)), (want,))
    want = over_envs(lambda r, g, v: rlax.n_step_bootstrapped_returns(r, g, v, 3), *args)
    assert_same(call("n_step_returns", float32(case), n=3), (want,))
    want = over_envs(rlax.discounted_returns, *args)
    assert_same(call("discounted_returns", float32(case)), (want,))


@pytest.mark.parametrize("clips", [(1.0, 1.0), (1.4, 0.6)])
def test_vtrace_equals_rlax(clips):
    clip_rho, clip_pg = clips
    case = clean_case(2, per_row=False)
    x = folded(case)
    v_next = np.concatenate([x["values"][1:], x["last_values"][None]])
    out = over_envs(
        lambda v, n, r, g, rho: rlax.vtrace_td_error_and_advantage(
            v, n, r, g, rho, 0.7, clip_rho, clip_pg
        ),
        *(x["values"], v_next, x["rewards"], x["discount"], np.exp(x["log_rhos"])),
    )
    got = call("vtrace", float32(case), clip_rho=clip_rho, clip_pg_rho=clip_pg)
    assert_same(got, (out.pg_advantage, out.errors + x["values"]))


def test_retrace_equals_rlax():
    case = clean_case(3, per_row=False)
    x = folded(case)
    v_next = np.concatenate([x["expected_values"][1:], x["last_values"][None]])
    want = over_envs(
        rlax.general_off_policy_returns_from_q_and_v,
        *(x["q_values"][1:], v_next, x["rewards"], x["discount"]),
        0.7 * np.minimum(1, np.exp(x["log_rhos"][1:])),
    )
    assert_same(call("retrace", float32(case)), (want,))


# Worked by hand. γ = ½, λ = ½, three steps of one environment.


def column(*numbers):
    return jnp.array(numbers, jnp.float32)[:, None]


R, V = column(1, 2, 4), column(8, 4, 2)
LAST = jnp.array([6.0])
NEVER = column(0, 0, 0) > 0


def test_gae_by_hand():
    # δ = (1 + 2 − 8, 2 + 1 − 4, 4 + 3 − 2) = (−5, −1, 5); A₂ = 5, A₁ = −1 + 5/4, A₀ = −5 + A₁/4
    out = jaxroll.gae(R, V, LAST, NEVER, None, None, 0.5, 0.5)
    assert out.advantages[:, 0].tolist() == [-4.9375, 0.25, 5.0]
    assert out.returns[:, 0].tolist() == [3.0625, 4.25, 7.0]


def test_truncated_step_bootstraps_from_final_observation():
    # Step 1 is cut short with V(final) = 10: δ₁ = 2 + 5 − 4 = 3, and step 2 adds nothing to it.
    cut, final = column(0, 1, 0) > 0, column(jnp.nan, 10, jnp.nan)
    out = jaxroll.gae(R, V, LAST, NEVER, cut, final, 0.5, 0.5)
    assert out.advantages[:, 0].tolist() == [-4.25, 3.0, 5.0]


def test_terminated_wins_over_truncated():
    both = column(0, 1, 0) > 0
    out = jaxroll.gae(R, V, LAST, both, both, column(jnp.nan, jnp.nan, jnp.nan), 0.5, 0.5)
    assert out.advantages[:, 0].tolist() == [-5.5, -2.0, 5.0]


def test_invalid_row_stands_for_its_value_only():
    # Step 0 bootstraps from V₁ = 4 and gets no trace; the row itself has no advantage.
    valid = column(1, 0, 1) > 0
    rewards = column(1, jnp.nan, 4)
    out = jaxroll.gae(rewards, V, LAST, NEVER, None, None, 0.5, 0.5, valid=valid)
    assert out.advantages[:, 0].tolist() == [-5.0, 0.0, 5.0]
    assert out.returns[:, 0].tolist() == [3.0, 4.0, 7.0]


def test_returns_by_hand():
    args = (LAST, NEVER, None, None, 0.5)
    assert jaxroll.lambda_returns(R, V, *args, 0.5)[:, 0].tolist() == [3.0625, 4.25, 7.0]
    assert jaxroll.discounted_returns(R, *args)[:, 0].tolist() == [3.75, 5.5, 7.0]
    assert jaxroll.n_step_returns(R, V, *args, n=2)[:, 0].tolist() == [2.5, 5.5, 7.0]
    skipped = jaxroll.discounted_returns(R, *args, valid=column(1, 0, 1) > 0)
    assert skipped[:, 0].tolist() == [4.5, 0.0, 7.0]


def test_vtrace_by_hand():
    # ρ = (½, 2, 1) clipped at 1: g₂ = 7; g₁ = 4 + (2 + 3.5 − 4); g₀ = 8 + ½ (1 + g₁/2 − 8)
    log_rhos = jnp.log(column(0.5, 2, 1))
    args = (log_rhos, R, V, LAST, NEVER, None, None, 0.5)
    out = jaxroll.vtrace(*args)
    assert_same((out.returns[:, 0], out.advantages[:, 0]), ([5.875, 5.5, 7], [-2.125, 1.5, 5]))
    # With ρ̄ = 2 only step 1 changes: δ₁ = 2 (2 + 1 − 4) = −2, then c₁ = 1 adds ½ · 5.
    out = jaxroll.vtrace(*args, clip_rho=2.0)
    assert_same((out.returns[:, 0],), ([8 - 2.5 + 0.25 * 0.5, 4.5, 7],))


def test_retrace_by_hand():
    # Q = V + 1; G₂ = 7, G₁ = 2 + ½ (2 + 1 · (7 − 3)), G₀ = 1 + ½ (4 + 1 · (G₁ − 5))
    log_rhos = jnp.log(column(0.5, 2, 1))
    out = jaxroll.retrace(log_rhos, R, V + 1, V, LAST, NEVER, None, None, 0.5)
    assert_same((out[:, 0],), ([3.0, 5.0, 7.0],))
