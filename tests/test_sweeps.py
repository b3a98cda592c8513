"""Members of a sweep learn what their solo runs learn, in one program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxroll
from jaxroll import parallel
from jaxroll.sweeps import Sweep, sweep
from jaxroll.train import History, programs

SMALL = {"num_envs": 4, "num_steps": 8, "hidden_sizes": (8,), "num_mini_batch": 2, "num_epochs": 1}
OPTIONS = {"progress": "silent", "log_interval": 32}


def make_ppo(**hyperparameters):
    return jaxroll.PPO.create("CartPole-v1", **SMALL | hyperparameters)


@pytest.fixture(scope="module")
def grid():
    return sweep(
        make_ppo(),
        96,
        seeds=[3, 5],
        hyperparameters={"learning_rate": [1e-2, 1e-3], "max_grad_norm": [None]},
        eval_interval=64,
        num_eval_episodes=4,
        **OPTIONS,
    )


def assert_close(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_member_equals_its_solo_run(grid):
    columns = {"learning_rate": 1e-3, "max_grad_norm": None, "seed": 5}
    alone = make_ppo(learning_rate=1e-3, max_grad_norm=None)
    state, history = alone.train(96, seed=5, eval_interval=64, num_eval_episodes=4, **OPTIONS)
    assert_close(grid.state(3), state)
    assert_close(grid.agent(3), alone)
    rows = grid.history.select(**columns)
    np.testing.assert_array_equal(rows.steps, history.steps)
    for name in ("episode_return", "eval_episode_return", "loss", "entropy"):
        np.testing.assert_allclose(rows[name], history[name], rtol=1e-3, atol=1e-4)
    mine, its = grid.eval(4)[3], alone.eval(state, 4)
    assert mine["episode_return"] == pytest.approx(its["episode_return"], rel=1e-4)


def test_rows_are_tidy(grid):
    assert [m["seed"] for m in grid.members] == [3, 5, 3, 5]
    assert [m["learning_rate"] for m in grid.members] == [0.01, 0.01, 0.001, 0.001]
    assert len(grid.history) == 3 * 4
    assert all(isinstance(row["loss"], float) for row in grid.history)
    assert {row["learning_rate"] for row in grid.history} == {0.01, 0.001}
    evaluated = [row["step"] for row in grid.history if "eval_episode_return" in row]
    assert sorted(set(evaluated)) == [64, 96]


def test_other_seeds_and_values_compile_nothing(grid):
    before = programs._advance._cache_size()
    sweep(
        make_ppo(),
        32,
        seeds=[8, 9],
        hyperparameters={"learning_rate": [0.5, 0.25], "max_grad_norm": [1.0]},
        **OPTIONS,
    )
    assert programs._advance._cache_size() == before


def test_best_looks_at_the_last_value_of_each_member(grid):
    rows = [
        {**columns, "step": step, "score": score}
        for i, columns in enumerate(grid.members)
        for step, score in ((1, 9.0 - i), (2, float(i == 2)))
    ]
    scored = dataclasses.replace(grid, history=History(rows))
    assert scored.best("score") == 2
    with pytest.raises(KeyError, match="Did you mean 'score'"):
        scored.best("scor")


def test_a_sweep_can_stop_and_go_on(tmp_path):
    options = {"seeds": 2, **OPTIONS}
    whole = sweep(make_ppo(), 96, checkpoint_dir=tmp_path / "whole", **options)
    sweep(make_ppo(), 64, checkpoint_dir=tmp_path / "parts", **options)
    parts = sweep(make_ppo(), 96, checkpoint_dir=tmp_path / "parts", resume=True, **options)
    for a, b in zip(jax.tree.leaves(whole.states), jax.tree.leaves(parts.states), strict=True):
        if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)
    read = History.read(tmp_path / "parts")
    assert [(row["seed"], row["step"]) for row in read] == [
        (seed, step) for step in (32, 64, 96) for seed in (0, 1)
    ]


@pytest.mark.long
def test_members_are_the_same_on_a_mesh():
    ppo = make_ppo(num_actors=2)
    options = {"seeds": 2, "reduction": "exact", **OPTIONS}
    one = sweep(ppo, 64, **options)
    two = sweep(ppo, 64, mesh=parallel.make_mesh(2), **options)
    assert_close(one.states, two.states)


@pytest.mark.long
@pytest.mark.parametrize("name", ["a2c", "daac", "impala"])
def test_every_agent_can_be_swept(name):
    own = {"impala": {"num_storages": 8, "batch_size": 4}}.get(name, {})
    agent = jaxroll.agents.AGENTS[name].create(
        "CartPole-v1", num_envs=4, num_steps=8, hidden_sizes=(8,), **own
    )
    result = sweep(agent, 128, seeds=2, progress="silent")
    state, _ = agent.train(128, seed=1, progress="silent")
    assert_close(result.state(1).learner.params, state.learner.params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hyperparameters": {"num_steps": [8, 16]}}, "num_steps selects another program"),
        ({"hyperparameters": {"learning_rat": [1.0]}}, "Did you mean 'learning_rate'"),
        ({"hyperparameters": {"learning_rate": [1.0, -1.0]}}, "learning_rate must be > 0, got -1"),
        ({"hyperparameters": {"learning_rate": 1e-3}}, "a list of single values for learning_rate"),
        ({"hyperparameters": {"learning_rate": []}}, "a list of single values for learning_rate"),
        ({"hyperparameters": {"learning_rate": "12"}}, "a list of single values for learning_rate"),
        ({"hyperparameters": {"learning_rate": [[1.0, 2.0]]}}, "a list of single values"),
        ({"hyperparameters": "learning_rate"}, "hyperparameters must map names to lists"),
        ({"seeds": []}, "seeds must be"),
        ({"seeds": "12"}, "seeds must be an integer, got '12'"),
        ({"seeds": True}, "seeds must be an integer, got True"),
        ({"seeds": [1, 1]}, "seeds must be"),
        ({"seeds": [-1]}, "seeds must be"),
    ],
)
def test_what_cannot_be_swept_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Sweep.create(make_ppo(), **options)


def test_host_environments_are_refused():
    pytest.importorskip("gymnasium")
    agent = jaxroll.PPO.create("gymnasium:CartPole-v1", **SMALL)
    with pytest.raises(TypeError, match="runs on the host"):
        Sweep.create(agent, seeds=2)


def test_only_agents_can_be_swept():
    with pytest.raises(TypeError, match=r"agent must be an agent, .* got 3"):
        Sweep.create(3)


class Adaptive(jaxroll.PPO):
    """PPO with a coefficient of its own, which each update moves by the learning rate."""

    def init_extras(self, params):
        return {"coef": jnp.ones(())}

    def update(self, state, rollouts, **options):
        state, metrics = super().update(state, rollouts, **options)
        extras = {"coef": state.learner.extras["coef"] * (1 + self.learning_rate)}
        return state.replace(learner=state.learner.replace(extras=extras)), metrics


def test_state_of_an_algorithms_own_is_swept():
    agent = Adaptive.create("CartPole-v1", **SMALL)
    rates = {"learning_rate": [0.5, 0.25]}
    result = sweep(agent, 64, hyperparameters=rates, **OPTIONS)
    np.testing.assert_allclose(result.states.learner.extras["coef"], [1.5**2, 1.25**2])
