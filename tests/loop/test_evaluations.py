"""Evaluation in the shell: only whole episodes count, on whichever kind of environment."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import DistributedTrainer, collectors, spaces
from jaxroll.envs import autoreset
from jaxroll.reporting import History
from jaxroll.sweeps import Sweep, SweepResult
from tests.agents.agent_toys import init, small


@dataclasses.dataclass(frozen=True)
class Sometimes:
    """Episodes of 3 steps that earn 1 each; a share of them never ends and earns 10 a step."""

    endless: float

    observation_space = spaces.Box.create(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, key):
        return (jax.random.bernoulli(key, self.endless), jnp.int32(0)), jnp.zeros(1)

    def step(self, key, state, action):
        endless, time = state
        reward = jnp.where(endless, 10.0, 1.0)
        return (endless, time + 1), jnp.zeros(1), reward, ~endless & (time + 1 == 3)


@pytest.fixture(autouse=True)
def short_limit(monkeypatch):
    monkeypatch.setattr(collectors.evaluation, "MAX_STEPS_PER_EPISODE", 20)


def test_episodes_that_do_not_end_are_left_out_of_the_means_and_counted():
    agent = small("ppo", autoreset(Sometimes(endless=0.3)))
    state = init(agent, jax.random.key(0))
    with pytest.warns(UserWarning, match=r"of 300 episodes did not end.*time limit"):
        result = agent.eval(state, 300)  # 128 environments play two or three each
    ended = result["is_complete"]
    assert 0 < result["num_unfinished"] == (~ended).sum() < 300
    assert (result["episode_lengths"] == 0).any(), "none was never begun"
    assert result["episode_return"] == result["episode_length"] == 3
    assert result["episode_return_std"] == 0
    assert np.isnan(result["episode_returns"][~ended]).all()
    assert (result["episode_returns"][ended] == 3).all()


def test_means_of_no_episode_are_not_a_number():
    agent = small("ppo", autoreset(Sometimes(endless=1.0)))
    with pytest.warns(UserWarning, match="4 of 4 episodes did not end"):
        result = agent.eval(init(agent, jax.random.key(0)), 4)
    assert result["num_unfinished"] == 4
    assert np.isnan([result["episode_return"], result["episode_length"]]).all()


def test_rows_and_tests_tell_how_many_episodes_did_not_end():
    env = autoreset(Sometimes(endless=0.3))
    options = {"num_envs": 4, "num_steps": 8, "hidden_sizes": [8]}
    config = {"agent": "ppo", "num_train_steps": 32, "hyperparameters": options}
    config |= {"num_eval_episodes": 40, "eval_interval": 32, "progress": "silent"}
    trainer = DistributedTrainer(config, train_env=env)
    with pytest.warns(UserWarning, match="did not end"):
        _, history = trainer.train()
    with pytest.warns(UserWarning, match="did not end"):
        result = trainer.test(40)
    assert history["eval_episode_return"].tolist() == [3]
    assert 0 < history["eval_num_unfinished"][0] < 40
    assert result["episode_return"] == 3


def test_members_of_a_sweep_leave_out_their_own_unfinished_episodes():
    agent = small("ppo", autoreset(Sometimes(endless=0.3)))
    members = Sweep.create(agent, seeds=2)
    result = SweepResult(members, jax.jit(members.init)(None), History())
    with pytest.warns(UserWarning, match="of 80 episodes did not end"):
        rows = result.eval(40)
    assert [row["episode_return"] for row in rows] == [3, 3]
    assert all(0 < row["num_unfinished"] < 40 for row in rows)
