"""Dtypes are those of 32 bits under x64, bfloat16 stays inside networks, keys are of any kind."""

import re

import jax
import numpy as np
import pytest

from jaxroll.collectors import collect, evaluate
from tests.agents.agent_toys import CLOCK, SMALL, init, small, train_step
from tests.tiers import plain

SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
}
ENVS = plain(["CartPole-v1", "Pendulum-v1", "Breakout-MinAtar"], ["CartPole-v1"])
OPTIONS = plain([{}, {"normalize_observations": True}, {"network": "lstm"}], [{}])


def shapes(agent):
    """What init, a train step and an evaluation give, by shape and dtype."""
    state = jax.eval_shape(agent.init, jax.random.key(0))
    after, metrics = jax.eval_shape(agent.train_step, state)

    def play(state, key):
        params = agent.acting_params(state.learner)
        return evaluate(agent.env, agent.policy, params, key, num_episodes=2)

    return state, after, metrics, jax.eval_shape(play, state, jax.random.key(1))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("name", SMALL)
def test_dtypes_do_not_depend_on_settings(name, env, options, setting):
    expected = shapes(small(name, env, **options))
    with SETTINGS[setting]():
        got = shapes(small(name, env, **options))
    assert got == expected
    assert jax.tree.map(lambda x: x.dtype, got[0]) == jax.tree.map(lambda x: x.dtype, got[1])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("name", "env"),
    plain(
        [
            ("ppo", "CartPole-v1"),
            ("ppo", "gymnasium:CartPole-v1"),
            ("impala", "CartPole-v1"),
            ("impala", "gymnasium:CartPole-v1"),
        ],
        [("ppo", "CartPole-v1")],
    ),
)
def test_training_runs_under_every_setting(name, env, setting):
    with SETTINGS[setting]():
        agent = small(name, env)
        steps = agent.steps_per_iteration
        state, history = agent.train(
            3 * steps, log_interval=steps, progress="silent", eval_interval=3 * steps
        )
    assert {x.dtype.name for x in jax.tree.leaves(state.learner)} <= {"float32", "int32", "uint32"}
    assert np.isfinite(history["eval_episode_return"][-1])


# bfloat16.


def dots(function, *arguments):
    """How many products of a program are of bfloat16, and how many there are."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    lines = re.findall(r"stablehlo\.dot_general.*|stablehlo\.convolution.*", text)
    return sum("bf16" in line for line in lines), len(lines)


@pytest.mark.parametrize(
    ("name", "network"),
    plain(
        [(name, network) for name in SMALL for network in ("mlp", "lstm", "gru")],
        [("ppo", "mlp"), ("daac", "mlp"), ("impala", "lstm")],
    ),
)
def test_bfloat16_agents_have_the_dtypes_of_float32_ones(name, network):
    half, full = (small(name, network=network, dtype=x) for x in ("bfloat16", "float32"))
    with jax.numpy_dtype_promotion("strict"):
        got = shapes(half)
    assert got == shapes(full)
    state = got[0]
    few, many = dots(half.train_step, state)
    assert 0 < few < many  # the heads are in float32
    assert dots(full.train_step, state)[0] == 0


@pytest.mark.parametrize(
    ("name", "env", "network"),
    plain(
        [
            ("ppo", CLOCK, "mlp"),
            ("ppo", CLOCK, "lstm"),
            ("impala", CLOCK, "gru"),
            ("daac", CLOCK, "mlp"),
            ("ppo", "Breakout-MinAtar", "cnn"),
        ],
        [("ppo", CLOCK, "mlp")],
    ),
)
def test_bfloat16_trains_from_float32_params_with_about_the_loss_of_float32(name, env, network):
    full, half = (small(name, env, network=network, dtype=x) for x in ("float32", "bfloat16"))
    state = init(full, jax.random.key(0))
    _, expected = train_step(full, state)
    after, metrics = train_step(half, state)
    for column in ("policy_loss", "value_loss"):
        loss, wanted = (metric[column].result() for metric in (metrics, expected))
        np.testing.assert_allclose(loss, wanted, rtol=0.1, atol=0.05)
        assert loss != wanted
    before = state.learner.params
    moved = jax.tree.map(lambda x, y: (x != y).any(), after.learner.params, before)
    assert any(jax.tree.leaves(moved))


def test_other_dtypes_of_networks_are_refused():
    for wrong in ("float16", "bf16", np.float64, None):
        with pytest.raises(ValueError, match="dtype must be one of 'float32', 'bfloat16', got"):
            small("ppo", dtype=wrong)


# Keys.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "impala"])
def test_keys_of_another_kind_go_through_everything(name):
    agent = small(name, "CartPole-v1")
    state = agent.init(jax.random.key(0, impl="unsafe_rbg"))
    after, _ = train_step(agent, state)
    assert "rbg" in str(after.actors.key.dtype)
    assert int(after.learner.iteration) == 1
    params, actor = agent.acting_params(after.learner), jax.tree.map(lambda x: x[0], after.actors)
    _, rollout = jax.jit(collect, static_argnums=(0, 1, 4))(
        agent.env, agent.policy, params, actor, 8
    )
    assert len(np.unique(np.asarray(rollout.transition.obs), axis=0)) == 8
    keys = [jax.random.key(i, impl="unsafe_rbg") for i in range(2)]
    played = [
        evaluate(agent.env, agent.policy, params, k, num_episodes=4, deterministic=False)
        for k in keys
    ]
    assert all(x.is_complete.all() for x in played)
    assert (played[0].episode_length != played[1].episode_length).any()


@pytest.mark.slow
def test_training_uses_the_default_kind_of_keys():
    with jax.default_prng_impl("unsafe_rbg"):
        agent = small("ppo", "CartPole-v1")
        steps = agent.steps_per_iteration
        state, history = agent.train(2 * steps, progress="silent", eval_interval=2 * steps)
    assert "rbg" in str(state.actors.key.dtype)
    assert np.isfinite(history["eval_episode_return"][-1])
