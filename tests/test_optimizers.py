"""Optimisers are those of optax, clipped and guarded, as trees and as vectors."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxroll import optimizers
from jaxroll.optimizers import apply_gradient, clipped_adam, clipped_rmsprop, flatten

PARAMS = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.array(0.1)}
MAX_NORM = jnp.float32(0.5)
OPTIMIZERS = {
    "adam": (
        clipped_adam(jnp.float32(0.1), MAX_NORM, epsilon=jnp.float32(1e-5)),
        optax.adam(0.1, eps=1e-5),
    ),
    "rmsprop": (
        clipped_rmsprop(
            jnp.float32(0.1), MAX_NORM, decay=jnp.float32(0.9), epsilon=jnp.float32(0.01)
        ),
        optax.rmsprop(0.1, decay=0.9, eps=0.01),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_are_those_of_optax_behind_its_clip(name):
    ours, theirs = OPTIMIZERS[name]
    theirs = optax.chain(optax.clip_by_global_norm(0.5), theirs)
    params = expected = PARAMS
    state, their_state = ours.init(params), theirs.init(params)
    rng = np.random.default_rng(0)
    for scale in (0.01, 1, 1, 10, 0.1, 1e3):
        grads = jax.tree.map(lambda x, k=scale: jnp.asarray(k * rng.normal(size=x.shape)), PARAMS)
        norm = optax.global_norm(grads)
        params, state, report = apply_gradient(ours, params, state, grads)
        updates, their_state = theirs.update(grads, their_state, expected)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(report["grad_norm"], norm, rtol=1e-6)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), params, expected)


def test_without_a_norm_given_an_optimiser_finds_it():
    ours, _ = OPTIMIZERS["adam"]
    grads = {"w": jnp.array([3.0, 0.0, 4.0]), "b": jnp.array(0.0)}
    plain = ours.update(grads, ours.init(PARAMS), PARAMS)
    given = ours.update(grads, ours.init(PARAMS), PARAMS, norm=jnp.float32(5))
    chex.assert_trees_all_equal(plain, given)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("seen", [0, 2])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "optax"])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(name, seen, bad):
    optimizer = optax.adam(0.1) if name == "optax" else OPTIMIZERS[name][0]
    params, opt_state = PARAMS, optimizer.init(PARAMS)
    for _ in range(seen):
        good = {"w": jnp.array([1.0, 2.0, -1.0]), "b": jnp.array(1.0)}
        params, opt_state, _ = apply_gradient(optimizer, params, opt_state, good)
    grads = {"w": jnp.array([1.0, bad, 1.0]), "b": jnp.array(1.0)}
    after = apply_gradient(optimizer, params, opt_state, grads)
    chex.assert_trees_all_equal(after[:2], (params, opt_state))
    assert after[2]["nonfinite"].tolist() == [0, 1]  # leaves in order: b, w
    assert after[2]["grad_norm"] == 0


def test_a_sum_that_overflows_names_the_largest_leaf():
    ours, _ = OPTIMIZERS["adam"]
    large = {"w": jnp.full(3, 1.05e19), "b": jnp.array(1.0e19)}  # squares fit, their sum does not
    after = apply_gradient(ours, PARAMS, ours.init(PARAMS), large)
    chex.assert_trees_all_equal(after[0], PARAMS)
    assert after[2]["nonfinite"].tolist() == [0, 1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_vectors_an_optimiser_takes_the_same_steps(name):
    ours, _ = OPTIMIZERS[name]
    flat, flat_state, restore = flatten(ours, PARAMS, ours.init(PARAMS))
    assert flat_state.nu.shape == (4,)
    params = flat_params = PARAMS
    state = ours.init(PARAMS)
    for bad in (1.0, 3.0, jnp.nan, 1.0):
        grads = {"w": jnp.array([1.0, bad, -2.0]), "b": jnp.array(0.5)}
        params, state, report = apply_gradient(ours, params, state, grads)
        flat_params, flat_state, flat_report = apply_gradient(flat, flat_params, flat_state, grads)
        chex.assert_trees_all_equal(flat_report, report)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6)  # noqa: E731
    jax.tree.map(close, (flat_params, restore(flat_state)), (params, state))


@pytest.mark.parametrize("params", [{"w": jnp.zeros(3)}, {"w": jnp.zeros(99), "b": jnp.zeros(1)}])
def test_one_leaf_and_large_networks_stay_as_they_are(params, monkeypatch):
    monkeypatch.setattr(optimizers, "_SMALL", 64)
    ours, _ = OPTIMIZERS["adam"]
    state = ours.init(params)
    assert flatten(ours, params, state)[:2] == (ours, state)


def test_an_optimiser_of_optax_stays_as_it_is():
    adam = optax.adam(0.1)
    state = adam.init(PARAMS)
    flat, flat_state, restore = flatten(adam, PARAMS, state)
    assert flat is adam
    assert restore(flat_state) is state
