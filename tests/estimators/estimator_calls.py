"""Calls every estimator, and its reference, with the entries of a case."""

import estimator_reference as reference
import numpy as np
import pytest

import jaxroll
from jaxroll.types import Targets

ENDS = ("last_values", "terminated", "truncated", "bootstrap_values", "discount")


def call(name, case, **options):
    """Call an estimator with the entries of a case; the result as a tuple of arrays."""
    fields = {
        "gae": ("rewards", "values", *ENDS, "trace_lambda"),
        "lambda_returns": ("rewards", "values", *ENDS, "trace_lambda"),
        "n_step_returns": ("rewards", "values", *ENDS),
        "discounted_returns": ("rewards", *ENDS),
        "vtrace": ("log_rhos", "rewards", "values", *ENDS),
        "retrace": ("log_rhos", "rewards", "q_values", "expected_values", *ENDS),
    }[name]
    if name in ("vtrace", "retrace"):
        options.setdefault("trace_lambda", case["trace_lambda"])
    options.setdefault("valid", case["valid"])
    out = getattr(jaxroll, name)(*(case[field] for field in fields), **options)
    return (out.advantages, out.returns) if isinstance(out, Targets) else (out,)


def expected(name, case, **options):
    if name == "gae":
        advantages = reference.gae(case)
        return advantages, advantages + case["values"]
    out = getattr(reference, name)(case, **options)
    return out if isinstance(out, tuple) else (out,)


CLIPS = {"clip_rho": 1.3, "clip_c": 0.8, "clip_pg_rho": 1.1}
KINDS = [
    ("gae", {}),
    ("lambda_returns", {}),
    ("discounted_returns", {}),
    ("n_step_returns", {"n": 1}),
    ("n_step_returns", {"n": 3}),
    ("n_step_returns", {"n": 100}),
    ("vtrace", {}),
    ("vtrace", CLIPS),
    ("retrace", {}),
]
NAMES = list(dict.fromkeys(name for name, _ in KINDS))
each_kind = pytest.mark.parametrize(("name", "options"), KINDS)


def float32(case):
    return {
        k: x.astype(np.float32) if np.asarray(x).dtype == np.float64 and np.ndim(x) else x
        for k, x in case.items()
    }


def assert_same(got, want, rtol=2e-5, atol=2e-5):
    assert len(got) == len(want)
    for g, w in zip(got, want):
        np.testing.assert_allclose(np.asarray(g, np.float64), w, rtol=rtol, atol=atol)


def clean_case(seed=0, num_steps=9, num_envs=5, **options):
    """Every row valid, so that no NaN is left but in unused bootstrap values."""
    options.setdefault("invalid", 0)
    return reference.random_case(np.random.default_rng(seed), num_steps, num_envs, **options)
