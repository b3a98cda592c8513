"""envpool: resets on the next step, seeded anew at each reset."""

import gymnasium
import jax
import numpy as np
import pytest

from jaxroll import spaces
from jaxroll.collectors import HostCollector
from jaxroll.envs import make_env
from jaxroll.networks import make_policy

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*precision lowered.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def _installed():
    pytest.importorskip("envpool")


def test_cart_pole_rows_follow_the_contract():
    spec = make_env("envpool:CartPole-v1", max_episode_steps=5)
    assert spec == make_env("envpool:CartPole-v1", max_episode_steps=5)
    assert spec.action_space == spaces.Discrete(2)
    with spec.make(3) as envs:
        first = envs.reset(seed=7).copy()
        rows = [envs.step(np.array([0, 1, 0], np.int32)) for _ in range(13)]
        again = envs.reset(seed=7)
        other = envs.reset(seed=8)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    truncated = [bool(row.truncated.all()) for row in rows]
    valid = [bool(row.valid.all()) for row in rows]
    is_first = [bool(row.is_first.all()) for row in rows]
    assert truncated == [t in (4, 10) for t in range(13)]
    assert valid == [t not in (5, 11) for t in range(13)]
    assert is_first == [t in (5, 11) for t in range(13)]
    assert [row.reward[0] for row in rows] == [float(v) for v in valid]


def test_collected_rows_equal_an_environment_stepped_by_hand():
    """The hand steps Gymnasium's CartPole from each observation; 12 steps are the limit."""
    spec = make_env("envpool:CartPole-v1", max_episode_steps=12)
    policy = make_policy(spec.observation_space, spec.action_space)
    with spec.make(4) as envs:
        collector = HostCollector(envs, policy, max_truncations=16)
        actor = collector.init(jax.random.key(0))
        params = policy.init(jax.random.key(1), actor.obs)
        rollouts = []
        for _ in range(2):  # episodes go on from one to the next
            actor, rollout = collector.collect(params, actor, 60)
            rollouts.append(rollout)
    rows = jax.tree.map(lambda *x: np.concatenate(x), *(r.transition for r in rollouts))
    following = np.concatenate([rows.obs[1:], np.asarray(actor.obs)[None]])
    hand = gymnasium.make("CartPole-v1").unwrapped
    ends = {"terminated": 0, "truncated": 0}
    for b in range(4):
        elapsed, ended = 0, False
        for t in range(120):
            assert rows.valid[t, b] == (not ended)
            if ended:  # the row shows the final observation, does nothing, and is not the first
                assert (rows.reward[t, b], rows.is_first[t, b]) == (0, False)
                assert not rows.terminated[t, b]
                assert not rows.truncated[t, b]
                assert (np.abs(following[t, b]) <= 0.05).all(), "a new episode"
                elapsed, ended = 0, False
                continue
            assert rows.is_first[t, b] == (elapsed == 0)
            hand.reset()
            hand.state, elapsed = tuple(rows.obs[t, b].astype(np.float64)), elapsed + 1
            obs, reward, terminated, _, _ = hand.step(int(rows.action[t, b]))
            np.testing.assert_allclose(following[t, b], obs, rtol=1e-4, atol=1e-5)
            assert rows.reward[t, b] == reward
            # An end at the limit is truncated to envpool, also where the pole has fallen.
            truncated = elapsed == 12
            assert rows.truncated[t, b] == truncated
            assert rows.terminated[t, b] == (terminated and not truncated)
            ended = terminated or truncated
            ends["terminated"] += terminated and not truncated
            ends["truncated"] += truncated
    assert all(ends.values()), ends
    for start, rollout in zip((0, 60), rollouts):
        final, last = rollout.final, np.asarray(rollout.last_value)
        values = np.concatenate([rollout.transition.value, last[None]])
        cut = np.asarray(rollout.transition.truncated & ~rollout.transition.terminated)
        for b in range(4):
            steps = np.flatnonzero(cut[:, b])
            assert final.step[: len(steps), b].tolist() == steps.tolist()
            np.testing.assert_array_equal(final.obs[: len(steps), b], following[start + steps, b])
            bootstrap = np.where(cut[:, b], values[1:, b], 0)
            np.testing.assert_array_equal(rollout.transition.bootstrap_value[:, b], bootstrap)


def test_wrong_actions_are_refused_before_envpool_accepts_them():
    with make_env("envpool:CartPole-v1").make(3) as envs:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="shape"):
            envs.step(np.zeros(2, np.int32))
        with pytest.raises(TypeError, match="integers"):
            envs.step(np.zeros(3, np.float32))


def test_unknown_names_have_near_matches():
    with pytest.raises(ValueError, match="Did you mean 'CartPole-v1'"):
        make_env("envpool:CartPol-v1")
