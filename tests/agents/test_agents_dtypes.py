"""Dtypes are those of 32 bits under x64, and nothing relies on implicit promotion."""

import jax
import numpy as np
import pytest

from jaxroll.collectors import evaluate
from tests.agents.agent_toys import SMALL, small
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
@pytest.mark.parametrize("env", ["CartPole-v1", "gymnasium:CartPole-v1"])
@pytest.mark.parametrize("name", plain(["ppo", "impala"], ["ppo"]))
def test_training_runs_under_every_setting(name, env, setting):
    with SETTINGS[setting]():
        agent = small(name, env)
        steps = agent.steps_per_iteration
        state, history = agent.train(
            3 * steps, log_interval=steps, progress="silent", eval_interval=3 * steps
        )
    assert {x.dtype.name for x in jax.tree.leaves(state.learner)} <= {"float32", "int32", "uint32"}
    assert np.isfinite(history["eval_episode_return"][-1])
