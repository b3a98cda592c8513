"""Losses equal numpy, add over parts, and never see what has no weight."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import losses

RNG = np.random.default_rng(0)
N = 12
DATA = {
    name: RNG.normal(size=N).astype(np.float32)
    for name in ("log_probs", "old_log_probs", "advantages", "values", "old_values", "returns")
}
WEIGHTS = RNG.uniform(0.2, 2.0, N).astype(np.float32)
WEIGHTS[[2, 7]] = 0


def clipped_policy(d):
    ratio = np.exp(d["log_probs"] - d["old_log_probs"])
    return -np.minimum(ratio * d["advantages"], np.clip(ratio, 0.9, 1.1) * d["advantages"])


def clipped_value(d):
    clipped = d["old_values"] + np.clip(d["values"] - d["old_values"], -0.1, 0.1)
    return 0.5 * np.maximum((d["values"] - d["returns"]) ** 2, (clipped - d["returns"]) ** 2)


CASES = {
    "clipped_policy_loss": (("log_probs", "old_log_probs", "advantages"), clipped_policy, True),
    "policy_gradient_loss": (
        ("log_probs", "advantages"),
        lambda d: -d["log_probs"] * d["advantages"],
        False,
    ),
    "value_loss": (("values", "returns"), lambda d: (d["values"] - d["returns"]) ** 2 / 2, False),
    "clipped_value_loss": (("values", "old_values", "returns"), clipped_value, True),
    "advantage_loss": (("values", "advantages"), lambda d: (d["values"] - d["advantages"]) ** 2, 0),
    "entropy_bonus": (("values",), lambda d: d["values"], False),
    "approximate_kl": (
        ("log_probs", "old_log_probs"),
        lambda d: (
            np.exp(d["log_probs"] - d["old_log_probs"]) - 1 - (d["log_probs"] - d["old_log_probs"])
        ),
        False,
    ),
    "clip_fraction": (
        ("log_probs", "old_log_probs"),
        lambda d: abs(np.exp(d["log_probs"] - d["old_log_probs"]) - 1) > 0.1,
        True,
    ),
}


def call(name, data, weights):
    fields, _, clips = CASES[name]
    options = {"clip_epsilon": 0.1} if clips else {}
    return getattr(losses, name)(*(jnp.asarray(data[f]) for f in fields), weights, **options)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("name", [name for name in CASES if len(CASES[name][0]) > 1])
def test_shapes_that_would_broadcast_are_refused(name, weights):
    for field in CASES[name][0]:
        with pytest.raises(ValueError, match=r"one common shape.*\[12, 1\].*squeeze"):
            call(name, {**DATA, field: DATA[field][:, None]}, weights)


def test_shapes_of_explained_variance_and_of_streams_are_checked():
    with pytest.raises(ValueError, match=r"values \[12, 1\], returns \[12\]"):
        losses.explained_variance_sums(DATA["values"][:, None], DATA["returns"])
    streams = {"a": DATA["values"], "b": DATA["values"][:, None]}
    with pytest.raises(ValueError, match=r"values\['b'\] \[12, 1\]"):
        losses.value_loss(streams, {"a": DATA["returns"], "b": DATA["returns"]})
    with pytest.raises(ValueError, match="dicts of the same streams"):
        losses.value_loss(streams, DATA["returns"])


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_numpy_and_add_over_parts(name):
    reference = CASES[name][1](DATA)
    total, weight = call(name, DATA, jnp.asarray(WEIGHTS))
    np.testing.assert_allclose(total, (WEIGHTS * reference).sum(), rtol=1e-5)
    np.testing.assert_allclose(weight, WEIGHTS.sum(), rtol=1e-6)
    total, weight = call(name, DATA, None)
    np.testing.assert_allclose(total, reference.sum(), rtol=1e-5)
    assert weight == N
    grid = {k: v.reshape(3, 4) for k, v in DATA.items()}
    np.testing.assert_allclose(call(name, grid, None)[0], total, rtol=1e-6)
    halves = [
        call(name, {k: v[part] for k, v in DATA.items()}, jnp.asarray(WEIGHTS[part]))
        for part in (slice(0, 5), slice(5, N))
    ]
    pooled = jax.tree.map(jnp.add, *halves)
    np.testing.assert_allclose(pooled, call(name, DATA, jnp.asarray(WEIGHTS)), rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("junk", [np.nan, np.inf])
def test_rows_without_weight_leave_no_trace_in_loss_or_gradient(name, junk):
    def total(data):
        return call(name, data, jnp.asarray(WEIGHTS))[0]

    dirty = {k: np.where(WEIGHTS == 0, np.float32(junk), v) for k, v in DATA.items()}
    value, grads = jax.value_and_grad(total)(dirty)
    clean_value, clean_grads = jax.value_and_grad(total)(DATA)
    np.testing.assert_array_equal(value, clean_value)
    chex.assert_trees_all_equal(grads, clean_grads)


@pytest.mark.parametrize("name", ["clipped_policy_loss", "policy_gradient_loss", "value_loss",
                                  "clipped_value_loss", "advantage_loss"])  # fmt: skip
def test_gradient_flows_into_the_prediction_only(name):
    grads = jax.grad(lambda d: call(name, d, None)[0])(DATA)
    first, *estimates = CASES[name][0]
    assert np.abs(grads[first]).sum() > 0
    assert all((grads[field] == 0).all() for field in estimates)


def test_clipped_policy_has_no_gradient_beyond_the_clip_where_it_would_gain():
    grad = jax.grad(lambda x: losses.clipped_policy_loss(x, jnp.zeros(4), advantages)[0])
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0])
    ratio = jnp.array([1.3, 0.7, 1.3, 0.7])
    np.testing.assert_allclose(grad(jnp.log(ratio)), [0, -0.7, 1.3, 0], rtol=1e-5)


def test_streams_are_added():
    streams = {"a": DATA["values"], "b": DATA["old_values"]}
    returns = {"a": DATA["returns"], "b": DATA["advantages"]}
    total, weight = losses.value_loss(streams, returns, jnp.asarray(WEIGHTS))
    parts = [losses.value_loss(streams[k], returns[k], jnp.asarray(WEIGHTS))[0] for k in "ab"]
    np.testing.assert_allclose(total, sum(parts), rtol=1e-5)
    np.testing.assert_allclose(weight, WEIGHTS.sum(), rtol=1e-6)


def test_explained_variance_of_sums_is_that_of_the_pooled_rows():
    values, returns = DATA["values"] + 3, DATA["values"] + 3 + 0.3 * DATA["returns"]
    keep = WEIGHTS > 0
    weights = keep.astype(np.float32)
    dirty = np.where(keep, returns, np.nan)
    parts = [
        losses.explained_variance_sums(values[p], dirty[p], weights[p])
        for p in (slice(0, 3), slice(3, N))
    ]
    pooled = jax.tree.map(jnp.add, *parts).result()
    expected = 1 - (returns - values)[keep].var() / returns[keep].var()
    np.testing.assert_allclose(pooled, expected, rtol=1e-4)
    constant = losses.explained_variance_sums(jnp.zeros(4), jnp.ones(4))
    assert np.isnan(constant.result())


def test_safe_rows_clears_every_leaf_and_keeps_dtypes():
    tree = {"a": jnp.full((2, 3, 4), jnp.nan), "b": jnp.full((2, 3), 7, jnp.uint8)}
    weights = jnp.array([[1.0, 0, 1], [0, 1, 1]])
    clean = losses.safe_rows(tree, weights)
    assert clean["b"].dtype == jnp.uint8
    np.testing.assert_array_equal(clean["b"], 7 * (weights != 0))
    np.testing.assert_array_equal(np.isnan(clean["a"][..., 0]), weights != 0)


def test_half_precision_losses_are_summed_in_float32():
    total, weight = losses.weighted_sum(jnp.ones(4096, jnp.bfloat16))
    assert (total.dtype, float(total), float(weight)) == (jnp.float32, 4096, 4096)


def test_weights_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(4,\), got \(4, 1\)"):
        losses.weighted_sum(jnp.zeros(4), jnp.ones((4, 1)))
