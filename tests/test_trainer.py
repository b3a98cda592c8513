"""DistributedTrainer: one config to a whole run."""

import chex
import jax
import numpy as np
import pytest

import jaxroll
from jaxroll.config import Config
from jaxroll.envs.wrappers import TimeLimit
from jaxroll.train import History
from jaxroll.train.checkpoint import MismatchError
from jaxroll.train.lock import LockedError, RunLock
from jaxroll.trainer import DistributedTrainer

HYPERPARAMETERS = {
    "num_envs": 4,
    "num_steps": 8,
    "hidden_sizes": [8],
    "num_mini_batch": 2,
    "num_epochs": 1,
    "num_actors": 2,
}
CONFIG = {
    "num_train_steps": 64,
    "log_interval": 32,
    "progress": "silent",
    "hyperparameters": HYPERPARAMETERS,
}
_TIMES = ("fps", "total_time")


def rows(history):
    return [{k: v for k, v in row.items() if k not in _TIMES} for row in history]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trainer = DistributedTrainer(CONFIG | {"out": str(tmp_path_factory.mktemp("run") / "first")})
    trainer.train()
    return trainer


def test_a_run_leaves_its_config_metrics_and_checkpoint(run):
    assert Config.read(run.out) == run.config
    assert rows(History.read(run.out)) == rows(run.history)
    assert [row["step"] for row in run.history] == [32, 64]
    assert (run.out / "checkpoints").is_dir()


def test_the_config_of_a_run_reproduces_it(run):
    again = DistributedTrainer(Config.read(run.out).replace(out=None))
    state, history = again.train()
    assert rows(history) == rows(run.history)
    chex.assert_trees_all_equal(state.learner.params, run.state.learner.params)


def test_acting_shows_what_an_actor_collects_next_and_changes_nothing(run):
    before = jax.tree.map(np.asarray, run.state.learner)
    first, again, other = run.act(0), run.act(0), run.act(1)
    assert first.transition.reward.shape == (8, 2)
    chex.assert_trees_all_equal(first.transition, again.transition)
    assert (first.transition.obs != other.transition.obs).any()
    chex.assert_trees_all_equal(before, run.state.learner)
    with pytest.raises(ValueError, match="actor must be from 0 to 1, got 2"):
        run.act(2)


def test_testing_plays_whole_episodes(run):
    result = run.test(6, seed=1)
    assert result["episode_returns"].shape == (6,)
    assert result["episode_return"] == pytest.approx(result["episode_returns"].mean())
    assert run.test(6, seed=1)["episode_return"] == result["episode_return"]
    with pytest.raises(ValueError, match="num_episodes must be at least 1"):
        run.test(0)


def test_what_is_saved_is_loaded(run, tmp_path):
    assert run.save() == run.out / "model"
    assert run.save() == run.out / "model"
    elsewhere = DistributedTrainer(run.config)
    for path in (None, run.save(tmp_path / "mine")):
        state = elsewhere.load(path)
        chex.assert_trees_all_equal(state.learner, run.state.learner)


def test_a_run_is_not_written_over_but_continued(run):
    again = DistributedTrainer(run.config.replace(num_train_steps=96))
    with pytest.raises(FileExistsError, match="resume=True"):
        again.train()
    _, history = again.train(resume=True)
    assert [row["step"] for row in history] == [32, 64, 96]
    whole = DistributedTrainer(again.config.replace(out=None))
    _, expected = whole.train()
    assert rows(history) == rows(expected)


def test_a_resume_that_fails_leaves_the_config_as_it_was(run):
    again = DistributedTrainer(run.config.replace(num_train_steps=1024))
    before = (run.out / "config.toml").read_text()
    with RunLock(run.out), pytest.raises(LockedError):
        again.train(resume=True)
    assert (run.out / "config.toml").read_text() == before
    wider = DistributedTrainer(run.config.set({"hidden_sizes": [16], "num_train_steps": 1024}))
    with pytest.raises(MismatchError):
        wider.train(resume=True)
    assert (run.out / "config.toml").read_text() == before


def test_a_config_that_process_0_has_just_written_stops_no_other_process(run, monkeypatch):
    trained = []
    monkeypatch.setattr(
        jaxroll.train, "train", lambda *a, **kw: (trained.append(kw), (None, None))[1]
    )
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    DistributedTrainer(run.config).train()
    assert len(trained) == 1


@pytest.mark.slow
def test_several_seeds_are_one_run(tmp_path):
    trainer = DistributedTrainer(CONFIG | {"num_seeds": 2, "seed": 3, "out": str(tmp_path / "r")})
    state, history = trainer.train()
    assert {row["seed"] for row in history} == {3, 4}
    assert jax.tree.leaves(state.learner.params)[0].shape[0] == 2
    assert trainer.act().transition.reward.shape == (8, 2)
    result = trainer.test(4)
    assert len(result["seed_returns"]) == 2
    assert result["episode_return"] == pytest.approx(np.mean(result["seed_returns"]))
    again = DistributedTrainer(tmp_path / "r")
    again.load()
    assert again.test(4)["seed_returns"] == result["seed_returns"]


def test_environments_of_ones_own_are_taken():
    env = jaxroll.make_env("CartPole-v1", max_steps_in_episode=5)
    trainer = DistributedTrainer(CONFIG, train_env=env, test_env="CartPole-v1")
    assert trainer.agent.env == env
    assert trainer.test(4)["episode_length"] > 5
    with pytest.raises(ValueError, match="test_env must have the agent's observation_space"):
        DistributedTrainer(CONFIG, test_env="Acrobot-v1")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CartPole-v1", {"max_steps_in_episode": 5}),
        ("MemoryChain-bsuite", {"memory_length": 3, "num_bits": 2}),
        ("gymnasium:CartPole-v1", {"autoreset_mode": "NextStep", "vectorization_mode": "sync"}),
        ("gymnasium:Pendulum-v1", {"g": 9.81}),
        pytest.param(
            *("envpool:CartPole-v1", {"max_episode_steps": 20}),
            marks=pytest.mark.filterwarnings("ignore:.*precision lowered.*:UserWarning"),
        ),
    ],
)
def test_the_config_makes_the_environment_that_was_given(name, options):
    if ":" in name:
        pytest.importorskip(name.partition(":")[0])
    env = jaxroll.make_env(name, **options)
    config = DistributedTrainer({**CONFIG, "env_options": {"x": 1}}, train_env=env).config
    assert Config.from_toml(config.to_toml()).make_env() == env
    assert config.env == name
    assert options.items() <= config.env_options.items()


@pytest.mark.parametrize(
    "make",
    [
        lambda: TimeLimit(jaxroll.make_env("CartPole-v1"), max_steps=5),
        lambda: jaxroll.make_env("Pendulum-v1", max_torque=np.float32(1)),
    ],
)
def test_an_environment_that_no_config_makes_must_be_given_again(make, tmp_path):
    env = make()
    trainer = DistributedTrainer(CONFIG, train_env=env)
    trainer.config.write(tmp_path / "config.toml")
    with pytest.raises(ValueError, match=r"an environment object, \S+-v1.*train_env="):
        DistributedTrainer(tmp_path)
    again = DistributedTrainer(tmp_path, train_env=env)
    assert again.config == trainer.config
    assert again.agent.env == env


def test_host_environments_act_and_train():
    pytest.importorskip("gymnasium")
    trainer = DistributedTrainer(CONFIG, train_env="gymnasium:CartPole-v1")
    assert trainer.act().transition.reward.shape == (8, 2)
    _, history = trainer.train()
    assert history.steps[-1] == 64
    assert trainer.test(2)["episode_returns"].shape == (2,)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (3, TypeError, "config must be a Config"),
        ("nowhere.toml", FileNotFoundError, "no config at nowhere.toml"),
        ({"devices": 2}, ValueError, "--num-actors 2"),
        ({"env": "CartPol-v1"}, ValueError, "Did you mean 'CartPole-v1'"),
        ({"hyperparameters": {"num_envs": 6, "num_actors": 4}}, ValueError, "must divide num_envs"),
        ({"hyperparameters": {"hidden_sizes": ["a"]}}, (ValueError, TypeError), "hidden_sizes"),
        ({"hyperparameters": {"network": "transformer"}}, ValueError, "network"),
        ({"agent": "impala", "num_train_steps": 320}, ValueError, "more than the 320 steps"),
    ],
)
def test_mistakes_are_found_before_anything_is_made(config, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config | {"out": "run"} if isinstance(config, dict) else config
    with pytest.raises(error, match=message):
        DistributedTrainer(config)
    assert not list(tmp_path.iterdir())


def test_a_saved_model_is_replaced_on_request(tmp_path):
    settings = {"num_envs": 4, "num_steps": 8, "hidden_sizes": [8]}
    trainer = DistributedTrainer(
        {"env": "CartPole-v1", "num_train_steps": 64, "hyperparameters": settings}
    )
    trainer.save(tmp_path / "model")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        trainer.save(tmp_path / "model")
    assert trainer.save(tmp_path / "model", overwrite=True) == tmp_path / "model"
