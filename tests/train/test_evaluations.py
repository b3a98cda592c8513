"""Evaluation in the shell: only whole episodes count, on whichever kind of environment."""

import dataclasses
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import DistributedTrainer, make_env, parallel, spaces
from jaxroll.envs import autoreset
from jaxroll.sweeps import Sweep, SweepResult
from jaxroll.train import History, NonFiniteError, evaluation
from tests.agents.agent_toys import CLOCK, DRIFT, init, small


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


@pytest.fixture
def short_limit(monkeypatch):
    module = importlib.import_module("jaxroll.collectors.evaluate")  # not the function
    monkeypatch.setattr(module, "MAX_STEPS_PER_EPISODE", 20)


@pytest.mark.usefixtures("short_limit")
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


@pytest.mark.usefixtures("short_limit")
def test_means_of_no_episode_are_not_a_number():
    agent = small("ppo", autoreset(Sometimes(endless=1.0)))
    with pytest.warns(UserWarning, match="4 of 4 episodes did not end"):
        result = agent.eval(init(agent, jax.random.key(0)), 4)
    assert result["num_unfinished"] == 4
    assert np.isnan([result["episode_return"], result["episode_length"]]).all()


@pytest.mark.usefixtures("short_limit")
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


@pytest.mark.usefixtures("short_limit")
def test_members_of_a_sweep_leave_out_their_own_unfinished_episodes():
    agent = small("ppo", autoreset(Sometimes(endless=0.3)))
    members = Sweep.create(agent, seeds=2)
    result = SweepResult(members, jax.jit(members.init)(None), History())
    with pytest.warns(UserWarning, match="of 80 episodes did not end"):
        rows = result.eval(40)
    assert [row["episode_return"] for row in rows] == [3, 3]
    assert all(0 < row["num_unfinished"] < 40 for row in rows)


@pytest.mark.parametrize("trained", ["CartPole-v1", "gymnasium:CartPole-v1"])
def test_an_agent_is_evaluated_on_the_other_kind_of_environment(trained):
    pytest.importorskip("gymnasium")
    kinds = {"CartPole-v1", "gymnasium:CartPole-v1"}
    agent, other = small("ppo", make_env(trained)), make_env(*(kinds - {trained}))
    options = {"eval_interval": 32, "num_eval_episodes": 2, "progress": "silent"}
    state, history = agent.train(32, eval_env=other, **options)
    assert history["eval_episode_length"][0] > 1
    result = agent.eval(state, 3, env=other)
    assert result["episode_returns"].shape == (3,)
    assert result["num_unfinished"] == 0


def test_members_of_a_sweep_play_on_the_host_one_after_the_other():
    pytest.importorskip("gymnasium")
    members = Sweep.create(small("ppo", make_env("CartPole-v1")), seeds=2)
    states = jax.jit(members.init)(None)
    env = make_env("gymnasium:CartPole-v1")
    result = evaluation.evaluate(members, states, 3, env=env)
    assert result["episode_returns"].shape == (2, 3)
    alone = members.member(1).eval(jax.tree.map(lambda x: x[1], states), 3, env=env)
    np.testing.assert_array_equal(result["episode_returns"][1], alone["episode_returns"])


def test_an_environment_that_does_not_fit_is_refused():
    agent = small("ppo", DRIFT)
    state = init(agent, jax.random.key(0))
    with pytest.raises(ValueError, match="env must have the agent's observation_space"):
        agent.eval(state, 2, env=CLOCK)
    with pytest.raises(ValueError, match="env must have the agent's observation_space"):
        agent.eval(state, 2, env="CartPole-v1")
    with pytest.raises(TypeError, match=r"env must be an environment, .* Use jaxroll.make_env"):
        agent.eval(state, 2, env=3)


def test_evaluations_come_on_time_with_rows_of_their_own_and_over_a_resume(tmp_path):
    agent = small("ppo", DRIFT)
    options = {"log_interval": 96, "eval_interval": 64, "num_eval_episodes": 2}
    options |= {"progress": "silent"}
    _, history = agent.train(256, checkpoint_dir=tmp_path / "whole", **options)
    assert history.steps.tolist() == [64, 96, 128, 192, 256]
    evaluated = np.isfinite(history["eval_episode_return"])
    assert history.steps[evaluated].tolist() == [64, 128, 192, 256]
    agent.train(128, checkpoint_dir=tmp_path / "halves", **options)
    _, resumed = agent.train(256, checkpoint_dir=tmp_path / "halves", resume=True, **options)
    for name in ("step", "loss", "eval_episode_return"):
        np.testing.assert_array_equal(resumed[name], history[name])


def test_a_state_on_several_devices_is_evaluated_on_all_of_them(monkeypatch):
    agent = small("ppo", DRIFT)
    learner = init(agent, jax.random.key(0)).learner
    learner = parallel.place(learner, parallel.make_mesh(2), jax.sharding.PartitionSpec())
    state = types.SimpleNamespace(learner=learner)
    seen, play = [], evaluation.collectors.evaluate

    def spy(*args, mesh=None, **options):
        seen.append(mesh and mesh.size)
        return play(*args, mesh=mesh, **options)

    monkeypatch.setattr(evaluation.collectors, "evaluate", spy)
    alone, spread = (
        evaluation.evaluation_columns(agent, state, 0, 1, 5, None, spread)
        for spread in (False, True)
    )
    assert seen == [None, 2]
    assert spread == pytest.approx(alone)


def test_params_that_are_not_finite_are_not_evaluated():
    agent = small("ppo", DRIFT)
    state = agent.init(jax.random.key(0))
    params = jax.tree.map(lambda x: x * jnp.nan, state.learner.params)
    broken = state.replace(learner=state.learner.replace(params=params))
    with pytest.raises(NonFiniteError, match="the params are not finite"):
        agent.eval(broken, 4)


def test_member_whose_params_are_not_finite_has_no_return():
    members = Sweep.create(small("ppo", DRIFT), seeds=2)
    states = members.init(jax.random.key(0))
    params = jax.tree.map(lambda x: x.at[1].set(jnp.inf), states.learner.params)
    states = states.replace(learner=states.learner.replace(params=params))
    with pytest.warns(UserWarning, match=r"members \[1\] are not finite"):
        rows = SweepResult(members, states, History()).eval(4)
    assert [np.isnan(row["episode_return"]) for row in rows] == [False, True]
