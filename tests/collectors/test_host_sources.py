"""Real host environments of every source: collect, evaluate, and train a little."""

import importlib.util

import jax
import numpy as np
import pytest

from jaxroll import PPO, make_env
from jaxroll.collectors import HostCollector, evaluate_host
from jaxroll.networks import make_policy

SOURCES = {
    "HalfCheetah": ("mujoco", "gymnasium:HalfCheetah-v5", {}),
    "ALE Breakout": (
        "ale_py",
        "gymnasium:ALE/Breakout-v5",
        {"max_num_frames_per_episode": 400, "use_fire_reset": True},
    ),
    "envpool CartPole": ("envpool", "envpool:CartPole-v1", {}),
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*precision lowered.*:UserWarning"),
]


@pytest.fixture(params=SOURCES)
def spec(request):
    package, name, options = SOURCES[request.param]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return make_env(name, **options)


def test_it_collects_and_evaluates(spec, record_property):
    policy = make_policy(spec.observation_space, spec.action_space)
    with spec.make(3) as envs:
        collector = HostCollector(envs, policy)
        actor = collector.init(jax.random.key(0))
        params = policy.init(jax.random.key(1), actor.obs)
        ended = 0
        for _ in range(4):
            actor, rollout = collector.collect(params, actor, num_steps=64)
            rows = rollout.transition
            ended += int(rollout.episodes.count)
            assert rows.obs.shape[:2] == (64, 3)
            assert np.isfinite(rows.reward).all()
            assert np.isfinite(rows.log_prob).all()
            # What was seen is what a policy would say of it now.
            _, output = policy.apply(params, (), rows.obs[5], rows.is_first[5])
            np.testing.assert_allclose(
                output.distribution.log_prob(rows.action[5]), rows.log_prob[5], rtol=1e-3, atol=1e-4
            )
    result = evaluate_host(spec, policy, params, jax.random.key(2), num_episodes=4)
    assert result.is_complete.all()
    assert (np.asarray(result.episode_length) > 0).all()
    record_property("episodes collected", ended)
    record_property("lengths", np.asarray(result.episode_length).tolist())
    record_property("returns", np.round(np.asarray(result.episode_return), 2).tolist())


def test_it_trains(spec):
    agent = PPO.create(spec, num_envs=2, num_steps=16, num_mini_batch=2, num_epochs=1)
    state, history = agent.train(64, log_interval=32, progress="silent")
    assert history.steps.tolist() == [32, 64]
    assert np.isfinite(history["loss"]).all()
    assert int(state.learner.iteration) == 2
