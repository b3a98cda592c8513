"""Unrolled keys: the bits of JAX's own, whatever is drawn and however it is transformed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.keys import as_given, unrolled

KEY = jax.random.key(7)
DRAWS = {
    "bits": lambda k: jax.random.bits(k, (3, 5)),
    "bits8": lambda k: jax.random.bits(k, (9,), jnp.uint8),
    "bits16": lambda k: jax.random.bits(k, (9,), jnp.uint16),
    "scalar": jax.random.uniform,
    "normal": lambda k: jax.random.normal(k, (4, 1, 2)),
    "integers": lambda k: jax.random.randint(k, (17,), 0, 1000),
    "permutation": lambda k: jax.random.permutation(k, 40),
    "split": lambda k: jax.random.key_data(jax.random.split(k, (3, 2))),
    "fold_in": lambda k: jax.random.key_data(jax.random.fold_in(k, 2**31 - 1)),
    "nested": lambda k: jax.random.normal(jax.random.fold_in(jax.random.split(k, 3)[1], 4), (6,)),
    "nothing": lambda k: jax.random.normal(k, (0,)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("how", ["eager", "jit", "vmap"])
def test_draws_are_those_of_jax(name, how):
    draw = DRAWS[name]
    if how == "vmap":
        keys = jax.random.split(KEY, 4)
        one, other = jax.vmap(draw)(keys), jax.vmap(lambda k: draw(unrolled(k)))(keys)
    else:
        run = jax.jit if how == "jit" else lambda f: f
        one, other = run(draw)(KEY), run(lambda k: draw(unrolled(k)))(KEY)
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


def test_64_bit_draws_are_those_of_jax():
    with jax.enable_x64(True):
        one, other = (jax.random.bits(k, (5,), jnp.uint64) for k in (KEY, unrolled(KEY)))
        np.testing.assert_array_equal(one, other)


def test_keys_come_back_as_they_were_and_all_else_is_left_alone():
    tree = {"keys": jax.random.split(unrolled(KEY), 3), "own": KEY, "x": jnp.ones(2), "n": 3}
    found = as_given(tree)
    assert found["keys"].dtype == KEY.dtype
    np.testing.assert_array_equal(
        jax.random.key_data(found["keys"]), jax.random.key_data(jax.random.split(KEY, 3))
    )
    assert found["own"] is KEY
    assert found["n"] == 3


def test_keys_of_another_kind_stay_what_they_are():
    key = jax.random.key(0, impl="rbg")
    assert unrolled(key) is key


def test_a_draw_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="Draw in parts"):
        jax.jit(lambda k: jax.random.bits(unrolled(k), (2**16, 2**16))).lower(KEY)
