"""Agents in a user's own `jax.shard_map`, whether or not JAX checks what varies."""

import functools

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.agents.agent_toys import DRIFT, SMALL, leaves_equal, small
from tests.tiers import plain

SIZES = {"num_actors": 4, "num_envs": 8}
OPTIONS = {
    "ppo": {"num_mini_batch": 1, "normalize_observations": True, "normalize_rewards": True},
    "a2c": {},
    "daac": {"num_mini_batch": 1, "value_freq": 2},
    "impala": {"num_storages": 16, "batch_size": 4},
}


@functools.cache
def agent_and_state(name, network="mlp"):
    agent = small(name, DRIFT, network=network, **SIZES, **OPTIONS[name])
    return agent, jax.jit(agent.init)(jax.random.key(0))


def two_steps(agent, *, axis_name=None, reduction):
    """Steps of which each starts from the state before: the state is a scan's carry."""

    def step(state, _):
        return agent.train_step(state, axis_name=axis_name, reduction=reduction)

    return lambda state: jax.lax.scan(step, state, length=2)


def in_shard_map(agent, reduction, check_vma):
    mesh = jax.make_mesh((4,), ("mine",), axis_types=(AxisType.Auto,))
    specs = agent.state_specs("mine")
    return jax.jit(
        jax.shard_map(
            two_steps(agent, axis_name="mine", reduction=reduction),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(specs, PartitionSpec()),
            check_vma=check_vma,
        )
    )


# Unchecked is what `parallel.on_mesh` uses: tests/parallel/test_exactness.py has it for all.
KINDS = [(name, True, how) for name in SMALL for how in ("fast", "exact")]
KINDS += [("a2c", False, how) for how in ("fast", "exact")]


@pytest.mark.parametrize(("name", "check_vma", "reduction"), plain(KINDS, [("a2c", True, "fast")]))
def test_steps_in_a_users_shard_map_equal_those_on_one_device(name, check_vma, reduction):
    agent, state = agent_and_state(name)
    alone, expected = jax.jit(two_steps(agent, reduction=reduction))(state)
    spread, metrics = in_shard_map(agent, reduction, check_vma)(state)
    if reduction == "exact":
        assert leaves_equal(alone, spread)
        assert leaves_equal(expected, metrics)
    np.testing.assert_allclose(
        metrics["grad_norm"].result(), expected["grad_norm"].result(), rtol=1e-4
    )
    for a, b in zip(jax.tree.leaves(alone.learner.params), jax.tree.leaves(spread.learner.params)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("network", ["mlp", "gru"])
@pytest.mark.parametrize("name", SMALL)
def test_a_step_traces_where_jax_checks_what_varies(name, network, reduction):
    agent, state = agent_and_state(name, network)
    after, _ = jax.eval_shape(in_shard_map(agent, reduction, True), state)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
