"""Advantages with zero mean and unit spread, over the rows that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import normalize

X = np.random.default_rng(0).normal(3, 2, (6, 4)).astype(np.float32)
MASK = np.random.default_rng(1).random((6, 4)) < 0.6


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
def test_equals_numpy_over_the_rows_that_count(ddof, eps):
    kept = X[MASK].astype(np.float64)
    want = np.where(MASK, (X - kept.mean()) / (kept.std(ddof=ddof) + eps), 0)
    dirty = np.where(MASK, X, np.nan)
    np.testing.assert_allclose(normalize(dirty, MASK, ddof=ddof, eps=eps), want, atol=1e-5)
    weights = MASK.astype(np.float32)
    np.testing.assert_allclose(normalize(dirty, weights, ddof=ddof, eps=eps), want, atol=1e-5)


def test_without_weights_all_rows_count():
    want = (X - X.mean()) / (X.std() + 1e-8)
    np.testing.assert_allclose(normalize(X), want, atol=1e-5)


def test_fractional_weights_weigh():
    x, w = jnp.array([1.0, 5.0, 9.0]), jnp.array([0.3, 0.1, 0.0])
    mean, out = 2.0, normalize(x, w, eps=0.0)
    std = np.sqrt((0.3 * 1 + 0.1 * 9) / 0.4)
    np.testing.assert_allclose(out, [(1 - mean) / std, (5 - mean) / std, 0], rtol=1e-5)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("count", [0, 1])
def test_one_row_or_none_gives_zeros(ddof, eps, count):
    mask = jnp.arange(4) < count
    x = jnp.where(mask, 7.0, jnp.nan)

    def of(x):
        return normalize(x, mask, ddof=ddof, eps=eps)

    assert of(x).tolist() == [0.0] * 4
    assert np.isfinite(jax.grad(lambda x: of(x).sum())(x)).all()
    assert normalize(jnp.ones(1), ddof=ddof, eps=eps).tolist() == [0.0]
    assert normalize(jnp.ones(3), ddof=ddof, eps=eps).tolist() == [0.0] * 3


def test_half_precision_stays_and_counts_more_rows_than_it_has_digits():
    x = jnp.asarray(np.tile([1.0, 3.0], 4000), jnp.bfloat16)
    out = normalize(x)
    assert out.dtype == jnp.bfloat16
    assert set(np.asarray(out, np.float32).tolist()) == {-1.0, 1.0}


def test_over_a_mesh_axis_equals_over_all_rows():
    x = np.random.default_rng(2).normal(size=(3, 16)).astype(np.float32)
    mask = np.random.default_rng(3).random((3, 16)) < 0.4
    mask[:, :2] = False  # a device with no row that counts
    mesh = jax.make_mesh((8,), ("actors",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P(None, "actors")

    def pooled(x, m):
        return normalize(x, m, ddof=1, axis_name="actors")

    fun = jax.jit(jax.shard_map(pooled, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    np.testing.assert_allclose(fun(x, mask), normalize(x, mask, ddof=1), atol=1e-5)
    by_env = jax.vmap(pooled, in_axes=1, out_axes=1, axis_name="actors")
    np.testing.assert_allclose(by_env(x, mask), normalize(x, mask, ddof=1), atol=1e-5)


def test_bad_input_is_explained():
    with pytest.raises(ValueError, match=r"weights must have the shape \[2, 1\] of x, got \[2\]"):
        normalize(jnp.ones((2, 1)), jnp.ones(2))
    with pytest.raises(TypeError, match=r"floating point, got int32.*astype"):
        normalize(jnp.arange(3))
