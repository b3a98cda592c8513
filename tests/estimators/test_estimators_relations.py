"""What must hold between estimators, and between rollouts of the same experience."""

import estimator_reference as reference
import jax.numpy as jnp
import numpy as np
from estimator_calls import (
    CLIPS,
    assert_same,
    call,
    clean_case,
    each_kind,
    float32,
)


def test_gae_with_lambda_one_is_the_discounted_return():
    case = float32({**clean_case(4, per_row=False), "trace_lambda": 1.0})
    assert_same(call("gae", case)[1:], call("discounted_returns", case))


def test_gae_with_lambda_zero_is_the_one_step_error():
    case = float32({**clean_case(5), "trace_lambda": 0.0})
    assert_same(call("gae", case)[1:], call("n_step_returns", case, n=1))


def test_on_policy_vtrace_is_the_lambda_return():
    case = reference.random_case(np.random.default_rng(6), 9, 5)
    case = float32({**case, "log_rhos": np.where(case["valid"], 0, np.nan)})
    advantages, returns = call("vtrace", case)
    assert_same((advantages, returns), call("gae", case))
    assert_same((returns,), call("lambda_returns", case))


def test_unclipped_vtrace_of_a_ratio_that_is_one_ignores_the_clips():
    case = float32({**clean_case(8), "log_rhos": np.zeros((9, 5))})
    inf = dict.fromkeys(CLIPS, jnp.inf)
    assert_same(call("vtrace", case, **inf), call("vtrace", case))


def test_on_policy_retrace_with_q_equal_to_v_is_the_lambda_return():
    case = clean_case(9)
    case = {**case, "q_values": case["values"], "expected_values": case["values"]}
    case = float32({**case, "log_rhos": np.full((9, 5), 0.3)})
    assert_same(call("retrace", case), call("lambda_returns", case))


def test_retrace_without_trace_is_the_one_step_target():
    case = float32({**clean_case(10), "trace_lambda": 0.0})
    assert_same(
        call("retrace", case),
        call("n_step_returns", {**case, "values": case["expected_values"]}, n=1),
    )


def test_n_at_least_the_horizon_sums_everything():
    case = float32(clean_case(11))
    for n in (9, 10, 1000):
        assert_same(call("n_step_returns", case, n=n), call("discounted_returns", case))


@each_kind
def test_a_split_at_an_episodes_end_changes_nothing(name, options):
    case = clean_case(12, num_steps=10)
    case["terminated"][4], case["truncated"][4] = [True, False, True, False, True], True
    case["bootstrap_values"][4] = np.where(case["terminated"][4], np.nan, 1.5)
    case = float32(case)
    first = {k: x[:5] if np.ndim(x) == 2 else x for k, x in case.items()}
    first["last_values"] = np.full(5, np.nan, np.float32)
    second = {k: x[5:] if np.ndim(x) == 2 else x for k, x in case.items()}
    parts = zip(call(name, first, **options), call(name, second, **options))
    whole = call(name, case, **options)
    assert_same([np.concatenate(p) for p in parts], whole, atol=1e-6)


@each_kind
def test_a_truncation_with_bootstrap_is_a_rollout_that_ends_there(name, options):
    case = float32(clean_case(13, ends=0))
    for flag in ("terminated", "truncated"):
        case[flag][:] = False
    whole = {**case, "last_values": np.arange(5, dtype=np.float32)}
    cut = {
        **whole,
        "truncated": np.zeros((9, 5), bool),
        "last_values": case["last_values"] * np.nan,
    }
    cut["truncated"][-1] = True
    cut["bootstrap_values"] = np.full((9, 5), np.nan, np.float32)
    cut["bootstrap_values"][-1] = whole["last_values"]
    assert_same(call(name, cut, **options), call(name, whole, **options), atol=1e-6)


def test_a_rollout_cut_and_continued_equals_the_uncut_one_up_to_the_bootstrap():
    case = float32(clean_case(14, ends=0, num_steps=8))
    case["terminated"][:], case["truncated"][:] = False, False
    case["last_values"] = np.ones(5, np.float32)
    whole = call("lambda_returns", case)[0]
    head = {k: x[:4] if np.ndim(x) == 2 else x for k, x in case.items()}
    # What follows step 3 in the uncut rollout: (1 − λ₃) v₄ + λ₃ G₄.
    lam = case["trace_lambda"][3]
    head["last_values"] = (1 - lam) * case["values"][4] + lam * np.asarray(whole[4])
    assert_same(call("lambda_returns", head), (whole[:4],))


@each_kind
def test_a_next_step_reset_row_is_the_same_as_a_truncation(name, options):
    """A host that resets on the next step: bootstrap_value[t] = value[t + 1], an invalid row."""
    case = float32(clean_case(15, ends=0, num_steps=6))
    for flag in ("terminated", "truncated"):
        case[flag][:] = False
    case["last_values"] = np.ones(5, np.float32)
    case["truncated"][2], case["valid"][3] = True, False
    case["bootstrap_values"][2] = case["values"][3]
    kept = {k: np.delete(x, 3, 0) if np.ndim(x) == 2 else x for k, x in case.items()}
    got = [np.delete(x, 3, 0) for x in call(name, case, **options)]
    assert_same(got, call(name, kept, **options), atol=1e-6)


@each_kind
def test_no_truncation_given_is_the_same_as_none_flagged(name, options):
    case = float32(clean_case(23, per_row=False))
    none = {**case, "truncated": None, "bootstrap_values": None, "valid": None}
    flagged = {**case, "truncated": np.zeros((9, 5), bool)}
    for c in (none, flagged):
        c["last_values"] = np.ones(5, np.float32)
    assert_same(call(name, none, **options), call(name, flagged, **options), atol=1e-6)
