"""Packed trees come back bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.collectors import packing
from jaxroll.collectors.packing import Packing

B = 3
TREE = {
    "obs": jnp.array([[1.0, -0.0], [jnp.nan, jnp.inf], [1e-45, 3.0]], jnp.float32),
    "action": jnp.array([-1, 2**31 - 1, 0], jnp.int32),
    "seed": jnp.array([0, 2**32 - 1, 7], jnp.uint32),
    "done": jnp.array([True, False, True]),
    "image": jnp.zeros((B, 2, 2), jnp.uint8),
    "half": jnp.ones(B, jnp.bfloat16),
    "key": jax.random.split(jax.random.key(0), B),
    "others": (jnp.zeros((2, B)), jnp.zeros(()), jnp.zeros((B, 0)), ()),
}


def bits(x):
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x).view(np.uint8) if x.size and x.ndim else np.asarray(x)


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(bits(x), bits(y))


def test_every_bit_comes_back():
    layout = Packing.of(TREE, B)
    packed = layout.pack(TREE)
    assert packed.words.shape == (B, 5)
    assert len(packed.others) == 6
    assert_same_bits(layout.unpack(packed), TREE)


def test_through_a_scan_and_a_batch_axis():
    layout = Packing.of(TREE, B)
    several = jax.tree.map(lambda x: jnp.stack([x, x]), TREE)

    def run(tree):
        return jax.lax.scan(lambda c, _: (c, c), layout.pack(tree), length=4)[1]

    stacked = jax.jit(jax.vmap(run))(several)
    assert stacked.words.shape == (2, 4, B, 5)
    expected = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (2, 4, *x.shape[1:])), several)
    assert_same_bits(layout.unpack(stacked), expected)


@pytest.mark.parametrize("names", [["obs"], ["image", "half"], []])
def test_what_is_no_two_small_leaves_stays_as_it_is(names):
    tree = {name: TREE[name] for name in names}
    packed = Packing.of(tree, B).pack(tree)
    assert packed.words is None
    assert len(packed.others) == len(names)


def test_large_leaves_stay_as_they_are():
    rows = packing._SMALL_BYTES // 4
    tree = {"small": jnp.zeros(rows), "also": jnp.zeros(rows, bool), "large": jnp.zeros((rows, 2))}
    packed = Packing.of(tree, rows).pack(tree)
    assert packed.words.shape == (rows, 2)
    assert [x.shape for x in packed.others] == [(rows, 2)]
