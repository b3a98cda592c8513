"""envpool: resets on the next step, seeded anew at each reset."""

import numpy as np
import pytest

from jaxroll import spaces
from jaxroll.envs import make_env

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
