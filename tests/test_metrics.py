"""Metrics: sums on the device equal numpy's weighted means, whatever they are merged over."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, PartitionSpec as P

from jaxroll.metrics import (
    Last,
    Mean,
    Sum,
    as_metrics,
    compute,
    merge,
    pack,
    unpack,
    zeros_like,
)


def measure(values, weights):
    return {
        "loss": Mean.of(values, weights),
        "rows": Sum(jnp.sum(weights > 0)),
        "newest": Last.of(values[-1]),
    }


def batches(num, size=8, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num, size)).astype(np.float32)
    weights = rng.integers(0, 3, size=(num, size)).astype(np.float32)
    return values, weights


def expected(values, weights):
    return {
        "loss": np.average(values.astype(np.float64), weights=weights),
        "rows": int((weights > 0).sum()),
        "newest": values[-1, -1],
    }


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_merged_minibatches_give_the_weighted_mean_of_all_rows():
    values, weights = batches(5)
    got = compute(functools.reduce(merge, [measure(v, w) for v, w in zip(values, weights)]))
    assert_same(got, expected(values, weights))
    mean_of_means = np.mean([np.average(v, weights=w) for v, w in zip(values, weights)])
    assert abs(got["loss"] - mean_of_means) > 1e-3  # else this test shows nothing


def test_metrics_are_a_scan_carry():
    values, weights = batches(6)

    @jax.jit
    def carried(values, weights):
        shapes = jax.eval_shape(measure, values[0], weights[0])
        step = lambda carry, x: (merge(carry, measure(*x)), None)  # noqa: E731
        return jax.lax.scan(step, zeros_like(shapes), (values, weights))[0]

    assert_same(compute(carried(values, weights)), expected(values, weights))


def test_sum_over_devices_equals_one_device():
    values, weights = batches(4)
    mesh = jax.make_mesh((4,), ("actors",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("actors"), P("actors")), out_specs=P())
    def spread(values, weights):
        return jax.lax.psum(measure(values[0], weights[0]), "actors")

    want = expected(values, weights)
    want["newest"] = values[:, -1].mean()  # of the actors, each has a newest
    assert_same(compute(spread(values, weights)), want)


def test_plain_array_is_the_mean_of_its_entries():
    step = lambda carry, x: (merge(carry, {"loss": x, "of": {"rows": x[0]}}), None)  # noqa: E731
    batches = jnp.array([[1.0, 3.0], [2.0, 10.0]])
    start = zeros_like({"loss": batches[0], "of": {"rows": batches[0, 0]}})
    assert compute(start) == {}
    assert compute(jax.lax.scan(step, start, batches)[0]) == {"loss": 4.0, "of/rows": 1.5}
    assert compute(as_metrics({"loss": np.arange(3)})) == {"loss": 1.0}


def test_packed_metrics_arrive_bit_by_bit():
    metrics = {
        "nan": Mean.of(jnp.nan),
        "many": Sum(jnp.int32(2**24 + 1)),
        "per_seed": {"loss": Mean(jnp.arange(3.0), jnp.ones(3))},
        "half": Sum(jnp.bfloat16(1.5)),
        "any": Sum(jnp.array([True, False])),
    }
    packed = jax.jit(pack)(metrics)
    assert packed.ndim == 1
    got = unpack(packed, jax.eval_shape(lambda: metrics))
    chex.assert_trees_all_equal(got, jax.device_get(metrics))
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, metrics)
    with pytest.raises(ValueError, match=r"like has 8 bytes, but packed has \d+"):
        unpack(packed, {"nan": metrics["nan"]})
    assert unpack(pack({}), {}) == {}


def test_vmapped_members_give_arrays_with_nan_where_a_member_measured_nothing():
    values, weights = batches(3)
    weights[1] = 0
    got = compute(jax.vmap(measure)(values, weights))
    want = [np.average(values[i], weights=weights[i]) for i in (0, 2)]
    np.testing.assert_allclose(got["loss"][[0, 2]], want, rtol=1e-5)
    assert np.isnan(got["loss"][1])


def test_what_was_not_measured_is_missing_but_a_nan_loss_stays_visible():
    nothing = zeros_like({"a": Mean.of(1.0), "b": Last.of(1.0)})
    assert compute(nothing) == {}
    assert np.isnan(compute({"loss": Mean.of(jnp.nan)})["loss"])


def test_row_of_weight_zero_may_hold_nan():
    assert compute({"x": Mean.of(jnp.array([2.0, jnp.nan]), jnp.array([1.0, 0.0]))}) == {"x": 2.0}


def test_merging_with_zeros_changes_nothing():
    metrics = measure(*[x[0] for x in batches(1)])
    for merged in (merge(zeros_like(metrics), metrics), merge(metrics, zeros_like(metrics))):
        chex.assert_trees_all_equal(merged, metrics)
        assert jax.tree.structure(merged) == jax.tree.structure(metrics)


@given(st.lists(st.tuples(st.integers(-100, 100), st.integers(0, 9)), min_size=1, max_size=20))
def test_mean_is_numpys(pairs):
    values, weights = np.array(pairs, np.float32).T
    got = compute({"x": Mean(np.sum(values * weights), np.sum(weights))})
    if weights.sum():
        assert got["x"] == pytest.approx(np.average(values, weights=weights), rel=1e-5, abs=1e-5)
    else:
        assert got == {}


def test_errors_name_the_rule():
    with pytest.raises(ValueError, match="only one side has: b"):
        merge({"a": Mean.of(1.0)}, {"a": Mean.of(1.0), "b": Mean.of(1.0)})
    with pytest.raises(ValueError, match="broadcast_to"):
        Mean.of(jnp.ones((2, 3)), jnp.ones(3))
