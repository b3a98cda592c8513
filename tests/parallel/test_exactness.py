"""The same curve everywhere: bitwise in exact mode, to rounding in fast mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxroll
from jaxroll import parallel
from jaxroll.agents import TrainState
from jaxroll.distributions import Categorical
from jaxroll.learner import map_actors
from tests.agents.agent_toys import DRIFT, leaves_equal, small
from tests.parallel.spread_agents import AGENTS

CLOCKS = ("fps", "total_time")


def train(agent, devices, iterations, **options):
    """(state, rows without clocks) after some iterations; devices None: no mesh."""
    mesh = None if devices is None else parallel.make_mesh(devices)
    steps = agent.steps_per_iteration
    state, history = agent.train(
        agent.prefilled_steps + iterations * steps,
        mesh=mesh,
        log_interval=max(1, iterations // 3) * steps,
        progress="silent",
        **{"reduction": "exact", **options},
    )
    rows = [{k: v for k, v in r.items() if k not in CLOCKS} for r in history.to_records()]
    return state, rows


def copies_are_identical(tree):
    """Whether every device holds the same bits of what is replicated."""
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        copies = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(set(copies)) == 1
    return True


@functools.cache
def tiny():
    return small("ppo", DRIFT, num_actors=4, num_mini_batch=1)


def test_exact_training_is_bitwise_the_same_on_any_mesh():
    alone = train(tiny(), None, 3)
    for devices in (1, 4):
        state, rows = train(tiny(), devices, 3)
        assert leaves_equal(alone[0], state)
        np.testing.assert_equal(rows, alone[1])
        assert copies_are_identical(state.learner)


# Every kind compiles for four meshes, a minute on two cores: some are slow, the others long.
def kinds(*slow):
    return [
        pytest.param(name, marks=pytest.mark.slow if name in slow else pytest.mark.long)
        for name in AGENTS
    ]


@pytest.mark.parametrize("name", kinds("ppo", "convolutional ppo", "daac", "impala"))
def test_thirty_exact_updates_are_bitwise_the_same_on_1_2_4_and_8_devices(name):
    agent = AGENTS[name]()
    alone = train(agent, 1, 30)
    for devices in (2, 4, 8):
        state, rows = train(agent, devices, 30)
        assert leaves_equal(alone[0], state)
        np.testing.assert_equal(rows, alone[1])
        assert copies_are_identical(state.learner)


def spread_update(agent, devices, reduction):
    """`agent.update` on a mesh, of states and rollouts that are whole."""
    mesh, specs = parallel.make_mesh(devices), agent.state_specs(parallel.ACTORS)
    update = functools.partial(agent.update, reduction=reduction)
    inputs = (specs, PartitionSpec(parallel.ACTORS))
    return jax.jit(parallel.on_mesh(update, mesh, inputs, (specs, PartitionSpec())))


def one_rollout(agent):
    """A state and a rollout of every actor."""
    state = jax.jit(agent.init)(jax.random.key(0))
    actors, rollouts = jax.jit(
        lambda s: map_actors(lambda a: agent.run(s.learner, a), s.actors, reduction="exact")
    )(state)
    return state.replace(actors=actors), rollouts


def close(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
    return True


def fast_updates_agree(agent, counts):
    state, rollouts = one_rollout(agent)
    exact, _ = spread_update(agent, 1, "exact")(state, rollouts)
    for devices in counts:
        fast, _ = spread_update(agent, devices, "fast")(state, rollouts)
        assert close(fast.learner.params, exact.learner.params)
        assert copies_are_identical(fast.learner)
    return True


@pytest.mark.slow
def test_a_fast_update_of_a_stored_rollout_agrees_with_the_exact_one_on_any_mesh():
    assert fast_updates_agree(tiny(), (1, 4))


@pytest.mark.parametrize("name", kinds())
def test_fast_updates_of_every_kind_agree_with_the_exact_one(name):
    assert fast_updates_agree(AGENTS[name](), (1, 2, 8))


def test_probabilities_leave_the_compiler_no_division_to_reorder():
    # x / broadcast(sum) is rewritten, or not, by what stands around it: another bit per mesh.
    entropy = jax.grad(lambda x: Categorical(x).entropy().sum())
    program = jax.jit(entropy).lower(jnp.ones((4, 3))).as_text()
    divisions = [line for line in program.splitlines() if "stablehlo.divide" in line]
    assert not [line for line in divisions if "tensor<4x3xf32>" in line]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pmap", "vmap"])
def test_a_step_runs_under_pmap_and_under_vmap_with_a_name(how):
    agent, devices = tiny(), 4
    state = jax.jit(agent.init)(jax.random.key(0))
    whole, _ = jax.jit(agent.train_step)(state)
    split = state.replace(
        actors=jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), state.actors)
    )
    axes = TrainState(learner=None, actors=0)
    step = functools.partial(agent.train_step, axis_name="i")
    mapped = {"pmap": jax.pmap, "vmap": jax.vmap}[how](step, axis_name="i", in_axes=(axes,))
    spread, metrics = mapped(split)
    for i in range(devices):
        copy = jax.tree.map(lambda x, i=i: np.asarray(x)[i], spread.learner.params)
        assert close(copy, whole.learner.params)
    assert int(np.asarray(spread.learner.iteration)[0]) == 1
    assert metrics["episodes"].total.shape == (devices,)


@pytest.mark.parametrize("name", ["PPO", pytest.param("IMPALA", marks=pytest.mark.slow)])
def test_a_state_is_spread_from_the_start_and_has_the_bits_of_one_device(name):
    ring = {"num_storages": 256, "batch_size": 64} if name == "IMPALA" else {}
    agent = getattr(jaxroll, name).create(
        "Breakout-MinAtar", num_actors=8, num_envs=128, num_steps=4, hidden_sizes=(4,), **ring
    )
    key, specs = jax.random.key(0), agent.state_specs(parallel.ACTORS)

    def compile_init(devices):
        mesh = parallel.make_mesh(devices)
        init = parallel.on_mesh(agent.init, mesh, PartitionSpec(), specs)
        return mesh, jax.jit(init).lower(key).compile()

    _, alone = compile_init(1)
    mesh, spread = compile_init(8)
    state = spread(parallel.place(key, mesh, PartitionSpec()))
    assert leaves_equal(state, alone(key))
    assert leaves_equal(state, jax.jit(agent.init)(key))
    expected = parallel.shardings(state, mesh, specs)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    whole, part = alone.memory_analysis(), spread.memory_analysis()
    common = sum(x.nbytes for x in jax.tree.leaves(state.learner))
    assert part.output_size_in_bytes - common < (whole.output_size_in_bytes - common) / 7
    # One actor is made after the other, so what is temporary is that of one, on any mesh.
    assert part.temp_size_in_bytes < 2 * whole.temp_size_in_bytes
