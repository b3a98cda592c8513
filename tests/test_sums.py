"""Sums to a scalar: right, in one order, and with a gradient of ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.sums import LANES, total


@pytest.mark.parametrize("shape", [(), (1,), (LANES,), (LANES + 1,), (7, 5), (3, 4, 50), (0,)])
def test_total_is_the_sum_of_all_entries(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    np.testing.assert_allclose(total(jnp.asarray(x)), x.astype(np.float64).sum(), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_total_keeps_the_dtype(dtype):
    assert total(jnp.ones((5, 7), dtype)).dtype == dtype
    assert int(total(jnp.ones((5, 7), dtype))) == 35


def test_total_adds_rows_of_lanes_then_halves():
    x = np.random.default_rng(1).normal(size=3 * LANES).astype(np.float32)
    lanes = np.zeros(LANES, np.float32)
    for row in x.reshape(-1, LANES):
        lanes = lanes + row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    assert np.asarray(jax.jit(total)(x)).tobytes() == lanes[0].tobytes()


def test_the_gradient_of_a_total_is_one_everywhere():
    assert (jax.grad(total)(jnp.ones((3, 9))) == 1).all()
