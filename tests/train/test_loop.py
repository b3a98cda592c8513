"""The shell: rows, resume, stops, faults; on agents that are as small as they can be."""

import dataclasses
import itertools
import os
import signal
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import pjit
from jax._src.array import ArrayImpl

from jaxroll import PPO, collectors, make_env
from jaxroll.collectors.host import HostCollector
from jaxroll.config import Config
from jaxroll.counts import count_value
from jaxroll.distributions import Categorical
from jaxroll.envs import autoreset
from jaxroll.networks import FunctionPolicy
from jaxroll.train import (
    History,
    JsonlLogger,
    hooks,
    preflight,
    programs,
    run,
    signals,
    states,
)
from jaxroll.train.checkpoint import Checkpointer, CheckpointWarning, NoCheckpointError
from jaxroll.types import PolicyOutput
from tests.agents.agent_toys import DRIFT, Drift, Poison, init, leaves_equal, run_actors, small
from tests.tiers import plain

QUIET = {"progress": "silent"}
# One of each thing that a state can hold: moments, carries, a filled ring, two optimisers.
AGENTS = {
    "normalised ppo": lambda: small(
        "ppo", DRIFT, normalize_observations=True, normalize_rewards=True, decay_steps=400
    ),
    "recurrent ppo": lambda: small("ppo", DRIFT, network="lstm", sequence_length=4),
    "a2c": lambda: small("a2c", DRIFT, decay_steps=300),
    "daac": lambda: small("daac", DRIFT, decay_steps=300, value_freq=2),
    "impala": lambda: small("impala", DRIFT, num_storages=12, decay_steps=300),
    "recurrent impala": lambda: small("impala", DRIFT, network="gru"),
}


@pytest.fixture(scope="module")
def ppo():
    return small("ppo", DRIFT)


@pytest.fixture
def compiled():
    """Grows by one with each program that is compiled."""
    seconds = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(listen)


def rows_of(history):
    """Rows without what a clock says."""
    return [
        {k: v for k, v in row.items() if k not in ("fps", "total_time")}
        for row in history.to_records()
    ]


def same_rows(one, other):
    assert len(rows_of(one)) == len(rows_of(other))
    for a, b in zip(rows_of(one), rows_of(other)):
        assert a.keys() == b.keys()
        np.testing.assert_equal(a, b)
    return True


@pytest.mark.parametrize("name", plain(AGENTS, ["normalised ppo", "impala"]))
def test_half_a_run_twice_is_a_run_bit_by_bit(name, tmp_path):
    agent = AGENTS[name]()
    options = {"log_interval": 64, "seed": 3, **QUIET}
    whole, history = agent.train(256, checkpoint_dir=tmp_path / "whole", **options)
    # 100 is no multiple of the interval: the row that it cuts must come out whole in the end.
    half, _ = agent.train(100, checkpoint_dir=tmp_path / "halves", **options)
    assert half.learner.iteration < whole.learner.iteration
    fresh = AGENTS[name]()
    resumed, continued = fresh.train(
        256, checkpoint_dir=tmp_path / "halves", resume=True, **options
    )
    assert leaves_equal(whole, resumed)
    assert same_rows(history, continued)
    written = [History.read(tmp_path / run) for run in ("whole", "halves")]
    assert same_rows(*written)
    assert same_rows(written[0], history)


def test_rows_come_on_a_fixed_interval_however_iterations_are_grouped(ppo, monkeypatch):
    def rows(pace):
        monkeypatch.setattr(run, "next_pace", lambda *args, **kwargs: pace)
        return ppo.train(320, log_interval=96, **QUIET)

    one, many = rows(1), rows(100)
    assert one[1].steps.tolist() == [96, 192, 288, 320]
    assert same_rows(one[1], many[1])
    assert leaves_equal(one[0], many[0])
    row = one[1].to_records()[0]
    expected = {"loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"}
    expected |= {"explained_variance", "grad_norm", "episode_return", "episode_length", "step"}
    expected |= {"episode", "fps", "total_time", "learning_rate"}
    assert expected <= row.keys()


def test_a_given_state_is_where_training_starts_and_is_not_destroyed(ppo):
    state = init(ppo, jax.random.key(5))
    before = jax.tree.map(jnp.copy, state)
    first, _ = ppo.train(64, state=state, **QUIET)
    assert leaves_equal(before, state)
    again, _ = ppo.train(64, state=state, **QUIET)
    assert leaves_equal(first, again)
    solo, _ = ppo.train(64, seed=5, **QUIET)
    assert leaves_equal(solo, first)
    # num_train_steps is the run's total: two more iterations for a state that has done two.
    onward, _ = ppo.train(128, state=first, **QUIET)
    assert onward.learner.iteration == 4


@pytest.mark.parametrize("source", ["device", "host"])
def test_another_seed_or_learning_rate_compiles_nothing(source, compiled):
    env = DRIFT
    if source == "host":
        pytest.importorskip("gymnasium")
        env = make_env("gymnasium:CartPole-v1")
    options = {"eval_interval": 64, "num_eval_episodes": 2, **QUIET}
    small("ppo", env).train(64, **options)
    compiled.clear()
    other = small("ppo", env, learning_rate=0.1).replace(discount=0.5)
    other.train(160, seed=4, **options)
    assert not compiled


def test_stops_say_why(ppo):
    _, history = ppo.train(10**9, target_return=-100.0, log_interval=64, **QUIET)
    assert history.stopped_by == "target_return"
    assert history.steps.tolist() == [64]
    _, history = ppo.train(10**9, time_budget=1e-3, **QUIET)
    assert history.stopped_by == "time_budget"
    events = []
    _, history = ppo.train(
        10**9,
        log_interval=32,
        callbacks=(c for c in [events.append, lambda e: e.step >= 96]),
        **QUIET,
    )
    assert history.stopped_by == "callback"
    assert [e.step for e in events] == [32, 64, 96]
    assert events[0].row["step"] == 32
    assert events[0].agent is ppo
    _, history = ppo.train(64, **QUIET)
    assert history.stopped_by == "steps"


def test_what_another_process_wants_stops_this_one_too(ppo, monkeypatch):
    wanted = hooks.STOPS.index("time_budget")
    monkeypatch.setattr(hooks.parallel, "process_max", lambda number: max(number, 2 * wanted))
    _, history = ppo.train(10**9, **QUIET)
    assert history.stopped_by == "time_budget"


def test_evaluations_come_with_their_rows_and_can_stop_the_run(ppo):
    options = {"log_interval": 32, "eval_interval": 64, "num_eval_episodes": 3}
    _, history = ppo.train(160, **options, **QUIET)
    evaluated = np.isfinite(history["eval_episode_return"])
    assert history.steps[evaluated].tolist() == [64, 128, 160]
    _, history = ppo.train(10**9, target_return=-1e6, **options, **QUIET)
    assert history.steps.tolist() == [32, 64]  # the row at 32 has no evaluation


@pytest.fixture
def default_hangup():
    """Under nohup SIGHUP is ignored, and a run leaves it so."""
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, old)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_saves_and_ends_the_run(ppo, tmp_path, signum, default_hangup):
    def press(event):
        if event.step == 64:
            os.kill(os.getpid(), signum)

    old = signal.getsignal(signum)
    state, history = ppo.train(
        10**9,
        log_interval=32,
        checkpoint_dir=tmp_path,
        callbacks=[press],
        on_signal="return",
        **QUIET,
    )
    assert history.stopped_by == signal.Signals(signum).name
    assert state.learner.iteration == 2
    assert signal.getsignal(signum) is old
    assert leaves_equal(ppo.load(tmp_path), state)
    onward, _ = ppo.train(128, checkpoint_dir=tmp_path, resume=True, log_interval=32, **QUIET)
    whole, _ = ppo.train(128, log_interval=32, **QUIET)
    assert leaves_equal(onward, whole)


def test_the_best_checkpoints_stay_beside_the_latest(ppo, tmp_path, monkeypatch):
    scores = iter([3.0, 9.0, 1.0, 5.0, 7.0, 2.0])
    monkeypatch.setattr(
        hooks, "evaluation_columns", lambda *args: {"eval_episode_return": next(scores)}
    )
    options = {"log_interval": 32, "eval_interval": 32, "keep_checkpoints": 1, "keep_best": 2}
    ppo.train(128, checkpoint_dir=tmp_path, **options, **QUIET)
    steps = Checkpointer(tmp_path / "checkpoints")
    assert steps.steps() == [64, 128]  # the best is not the latest, and the latest is there
    ppo.train(192, checkpoint_dir=tmp_path, resume=True, **options, **QUIET)
    assert steps.steps() == [64, 160, 192]
    assert states.best_checkpoint(tmp_path).name == "0000000064"
    assert ppo.load(states.best_checkpoint(tmp_path)).learner.iteration == 2
    ppo.train(32, checkpoint_dir=tmp_path / "other", **QUIET)
    with pytest.raises(NoCheckpointError, match=r"none is the best.*keep_best=1"):
        states.best_checkpoint(tmp_path / "other")


def test_the_rows_of_a_checkpoint_are_on_disk_before_it(ppo, tmp_path, monkeypatch):
    done = []
    for cls, name in ((JsonlLogger, "sync"), (Checkpointer, "save")):
        real = getattr(cls, name)
        monkeypatch.setattr(
            cls,
            name,
            lambda self, *a, real=real, name=name, **kw: (done.append(name), real(self, *a, **kw))[
                1
            ],
        )
    ppo.train(64, checkpoint_dir=tmp_path, checkpoint_interval=32, log_interval=32, **QUIET)
    assert done == ["sync", "save"] * 2


def test_without_an_interval_checkpoints_go_by_the_clock(ppo, tmp_path, monkeypatch):
    steps = []

    def look(event):
        steps.append(Checkpointer(tmp_path / "run" / "checkpoints").steps())

    options = {"checkpoint_dir": tmp_path / "run", "log_interval": 32, **QUIET}
    monkeypatch.setattr(hooks, "SECONDS_BETWEEN_SAVES", 0.0)
    ppo.train(128, keep_checkpoints=9, callbacks=[look], **options)
    assert steps[-1][0] == 32  # a kill -9 here would have cost little
    assert Checkpointer(tmp_path / "run" / "checkpoints").steps() == [32, 64, 96, 128]
    monkeypatch.undo()
    options["checkpoint_dir"] = tmp_path / "short"
    ppo.train(128, **options)
    assert Checkpointer(tmp_path / "short" / "checkpoints").steps() == [128]


def test_a_non_finite_gradient_stops_the_run_or_is_skipped_and_never_applied(tmp_path):
    agent = small("ppo", autoreset(Poison(after=10)))
    with pytest.raises(hooks.NonFiniteError, match=r"by step \d+, in .* leaves: .*Lower") as error:
        agent.train(256, checkpoint_dir=tmp_path, checkpoint_interval=32, log_interval=32, **QUIET)
    assert "policy_head" in str(error.value)
    last = agent.load(tmp_path)
    assert last.learner.iteration == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(last.learner.params))
    state, history = agent.train(96, nonfinite="skip", log_interval=32, **QUIET)
    assert history["skipped_updates"].tolist()[0] == 0
    assert history["skipped_updates"].max() > 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.learner.params))


def dead_end_policy():
    """Linear; later in an episode no action has a probability: all logits are −inf."""

    def apply(params, carry, obs, is_first):
        logits = jnp.where(obs[..., 1:] > 0.15, -jnp.inf, obs @ params["policy"])
        return carry, PolicyOutput(Categorical(logits), obs @ params["value"])

    init = {"policy": jnp.zeros((2, 3)), "value": jnp.ones(2)}
    return FunctionPolicy(lambda key, obs: init, apply)


@pytest.mark.parametrize("name", ["ppo", "a2c", "impala"])
def test_logits_that_are_all_minus_infinity_stop_the_run_or_are_skipped(name):
    agent = small(name, DRIFT, policy=dead_end_policy())
    with pytest.raises(hooks.NonFiniteError, match=r"loss or its gradient .*all −inf"):
        agent.train(256, log_interval=64, **QUIET)
    state, history = agent.train(128, nonfinite="skip", log_interval=64, **QUIET)
    assert (history["skipped_updates"] > 0).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.learner.params))


@dataclasses.dataclass(frozen=True)
class Glitch(Poison):
    """Observations are NaN too, where rewards are."""

    def step(self, key, time, action):
        time, obs, reward, terminated, truncated = super().step(key, time, action)
        return time, jnp.where(jnp.isnan(reward), reward, obs), reward, terminated, truncated


def test_normalisers_forget_what_is_not_finite_so_that_a_skipping_run_goes_on():
    normalized = {"normalize_observations": True, "normalize_rewards": True}
    agent = small("ppo", autoreset(Glitch(after=10)), **normalized)
    state, history = agent.train(256, nonfinite="skip", log_interval=32, **QUIET)
    skipped = history["skipped_updates"].tolist()
    assert skipped[1] > 0
    assert skipped[5] == 0, "steps 0 to 7 of the second episode"
    kept = (state.learner.obs_statistics, state.learner.reward_scaler, state.actors.reward_sums)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(kept))


BAD = {
    "num_train_steps must be at least 1": {"num_train_steps": 0},
    "resume=True needs the checkpoint_dir": {"resume": True},
    "give either resume=True or state": {"resume": True, "state": (), "checkpoint_dir": "x"},
    "nonfinite must be one of 'stop', 'skip'": {"nonfinite": "ignore"},
    "reduction must be one of 'fast', 'exact'": {"reduction": "sloppy"},
    "log_interval must be at least 1": {"log_interval": 0},
    "eval_interval must be at least 1": {"eval_interval": -5},
    "checkpoint_interval must be at least 1": {"checkpoint_interval": 0},
    "num_learners is the number of devices": {"num_learners": 2},
    "num_eval_episodes must be at least 1": {"num_eval_episodes": 0, "eval_interval": 64},
    "keep_checkpoints must be at least 1": {"keep_checkpoints": 0},
    "keep_best must be at least 0": {"keep_best": -1, "eval_interval": 64},
    "keep_best = 2 goes by eval_episode_return: give eval_interval": {"keep_best": 2},
    "progress must be one of": {"progress": "loud"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_options_are_refused_before_anything_is_written(message, tmp_path, monkeypatch):
    agent = small("ppo", DRIFT, num_envs=2)
    options = dict(BAD[message])
    directory = tmp_path / "run"
    if message != "resume=True needs the checkpoint_dir":
        options["checkpoint_dir"] = directory
    monkeypatch.setattr(run, "make_program", lambda *a: pytest.fail("too late"))
    with pytest.raises((ValueError, TypeError)) as error:
        agent.train(**{"num_train_steps": 64, **QUIET, **options})
    assert message in str(error.value)
    assert not directory.exists()


def test_an_environment_that_cannot_be_traced_leaves_no_directory(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Broken(Drift):
        def step(self, key, obs, action):
            return obs, obs, jnp.zeros((2, 3)) @ jnp.zeros(2), False

    agent = small("ppo", autoreset(Broken()))
    with pytest.raises(TypeError, match="dot_general"):
        agent.train(64, checkpoint_dir=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


def test_a_run_that_would_end_before_its_first_update_is_refused(tmp_path):
    agent = small("impala", DRIFT, num_storages=12)
    with pytest.raises(ValueError, match=f"more than the {agent.prefilled_steps} steps"):
        agent.train(agent.prefilled_steps, checkpoint_dir=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten(ppo, tmp_path):
    ppo.train(64, checkpoint_dir=tmp_path, **QUIET)
    with pytest.raises(FileExistsError, match=r"at step 64.*resume=True"):
        ppo.train(64, checkpoint_dir=tmp_path, **QUIET)
    state, history = ppo.train(64, checkpoint_dir=tmp_path, resume=True, **QUIET)
    assert state.learner.iteration == 2  # nothing was left to do
    assert history.stopped_by == "steps"
    assert history.steps.tolist() == [32, 64]


def test_params_of_another_run_are_a_start_and_must_fit(ppo, tmp_path):
    state, _ = ppo.train(64, checkpoint_dir=tmp_path / "run", **QUIET)
    ppo.save(state, tmp_path / "saved")
    assert leaves_equal(ppo.load(tmp_path / "saved"), state)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        ppo.save(state, tmp_path / "saved")
    seen = []
    for path in ("run", "saved"):
        agent = ppo.replace(learning_rate=1e-30)  # so that the params stay
        begun, _ = agent.train(32, init_model_path=tmp_path / path, seed=8, **QUIET)
        assert begun.learner.iteration == 1
        seen.append(begun)
        chex.assert_trees_all_equal(begun.learner.params, state.learner.params)
    assert leaves_equal(*seen)
    wider = small("ppo", DRIFT, hidden_sizes=(16,))
    with pytest.raises(ValueError, match=r"Dense_0.*\n?.*\[2, 16\]|16") as error:
        wider.train(32, init_model_path=tmp_path / "saved", **QUIET)
    assert "8" in str(error.value)
    with pytest.raises(FileNotFoundError):
        ppo.train(32, init_model_path=tmp_path / "nowhere", **QUIET)


def test_a_resumed_run_does_not_need_the_params_that_it_began_with(ppo, tmp_path):
    state, _ = ppo.train(32, **QUIET)
    ppo.save(state, tmp_path / "gone")
    options = {"checkpoint_dir": tmp_path / "run", "init_model_path": tmp_path / "gone", **QUIET}
    ppo.train(64, **options)
    whole, _ = ppo.train(128, **options | {"checkpoint_dir": tmp_path / "whole"})
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    onward, _ = ppo.train(128, resume=True, **options)
    assert leaves_equal(onward, whole)
    with pytest.raises(FileNotFoundError, match="init_model_path"):
        ppo.train(128, resume=True, **options | {"checkpoint_dir": tmp_path / "new"})
    assert not (tmp_path / "new").exists()


def test_a_policy_taken_from_a_run_keeps_its_statistics(tmp_path, monkeypatch):
    agent = small("ppo", DRIFT, normalize_observations=True)
    saved, _ = agent.train(64, seed=1, **QUIET)
    agent.save(saved, tmp_path / "saved")
    begun = []

    def program(*args):
        made = programs.make_program(*args)
        start = made.start
        made.start = lambda state: begun.append(jax.tree.map(jnp.copy, state)) or start(state)
        return made

    monkeypatch.setattr(run, "make_program", program)
    agent.train(32, init_model_path=tmp_path / "saved", seed=8, **QUIET)
    state, rollouts = run_actors(agent, begun[0])
    assert state.learner.iteration == 0
    step = jax.tree.map(lambda x: x[0].reshape(-1, *x.shape[3:]), rollouts.transition)
    params = agent.acting_params(saved.learner)
    _, output = agent.policy.apply(params, (), step.obs, step.is_first)
    np.testing.assert_allclose(output.distribution.log_prob(step.action), step.log_prob, rtol=1e-5)
    with pytest.raises(ValueError, match="Create the agent with normalize_observations=True"):
        small("ppo", DRIFT).train(32, init_model_path=tmp_path / "saved", **QUIET)


def test_whole_episodes_are_evaluated_and_repeatable(ppo):
    state = init(ppo, jax.random.key(0))
    one, two = (ppo.eval(state, 5, seed=1) for _ in range(2))
    assert one["episode_returns"].shape == (5,)
    assert one["episode_return"] == pytest.approx(one["episode_returns"].mean())
    np.testing.assert_array_equal(one["episode_returns"], two["episode_returns"])
    other = ppo.eval(state, 5, seed=2)
    assert not np.array_equal(one["episode_returns"], other["episode_returns"])


@pytest.fixture
def transfers(monkeypatch):
    """Grows by the shape of each array that is read from its device."""
    shapes = []
    value, asarray = ArrayImpl._value, np.asarray

    def read(array):
        shapes.append(array.shape)
        return value.fget(array)

    def as_numpy(array, *args, **kwargs):  # reads a CPU's memory as it is
        if isinstance(array, jax.Array):
            shapes.append(array.shape)
        return asarray(array, *args, **kwargs)

    monkeypatch.setattr(ArrayImpl, "_value", property(read))
    monkeypatch.setattr(np, "asarray", as_numpy)
    return shapes


def test_a_row_is_one_transfer(ppo, transfers):
    counts = []

    def count(event):
        counts.append(len(transfers))

    ppo.train(192, log_interval=32, callbacks=[count], **QUIET)
    assert np.diff(counts).tolist() == [1] * 5
    assert len(transfers[-1]) == 1  # all metrics, packed


@pytest.fixture
def dispatches(monkeypatch):
    """Grows by (name, how many of its arguments come from the host) with each dispatch."""
    found, call = [], pjit._pjit_call_impl_python

    def record(*args, name, **params):
        found.append((name, sum(not isinstance(x, jax.Array) for x in args)))
        return call(*args, name=name, **params)

    jax.clear_caches()  # and from here on every dispatch is made by this function
    monkeypatch.setattr(pjit, "_get_fastpath_data", lambda *args: None)
    monkeypatch.setattr(pjit, "_pjit_call_impl_python", record)
    yield found
    jax.clear_caches()


def test_a_row_is_two_dispatches_and_sends_two_numbers(ppo, dispatches):
    counts = []

    def count(event):
        counts.append(len(dispatches))

    ppo.train(160, log_interval=32, callbacks=[count], **QUIET)
    rows = [dispatches[start:end] for start, end in itertools.pairwise(counts)]
    # How many iterations, and whether to start at zero: no hyperparameter is sent again.
    assert rows == [[("_advance", 1), ("_read_metrics", 1)]] * 4


def test_rows_go_by_the_clock_unless_an_interval_is_given(ppo, tmp_path, monkeypatch):
    assert Config().log_interval is None
    assert ppo.train(64 * 32, **QUIET)[1].steps.tolist()[:2] == [64, 128]  # 2 % of 64 iterations
    monkeypatch.setattr(run, "MIN_ROWS", 1)
    monkeypatch.setattr(run, "next_pace", lambda *args, **kwargs: 1)
    monkeypatch.setattr(run, "SECONDS_PER_ROW", 0.0)
    state, history = ppo.train(128, **QUIET)
    assert history.steps.tolist() == [32, 64, 96, 128]
    monkeypatch.setattr(run, "SECONDS_PER_ROW", 3600.0)
    options = {"checkpoint_dir": tmp_path / "clock", **QUIET}
    ppo.train(64, **options)
    whole, history = ppo.train(128, resume=True, **options)
    assert history.steps.tolist() == [64, 128]
    assert "partial" not in history.names
    assert leaves_equal(whole, state)
    # A row that was cut by the end of a run comes out whole, whatever ends it.
    options["checkpoint_dir"] = tmp_path / "steps"
    ppo.train(96, log_interval=64, **options)
    _, history = ppo.train(192, resume=True, **options)
    assert history.steps.tolist() == [64, 192]
    same = ppo.train(192, resume=True, log_interval=64, **options)[1]
    assert same_rows(history, same)


def test_a_row_resets_metrics_inside_a_program(ppo, compiled):
    program = programs.make_program(ppo, None, "fast")
    carry = program.advance(program.start(program.init(0)), 2)
    before = jax.tree.map(np.array, carry["metrics"])
    kept, read = programs.read_metrics(carry, reset=False)
    assert leaves_equal(read["metrics"], before)
    assert leaves_equal(kept["metrics"], before)
    compiled.clear()
    zero, read = programs.read_metrics(kept, reset=True)
    assert not compiled
    assert leaves_equal(read["metrics"], before)
    assert leaves_equal(zero["metrics"], programs.zero_metrics(ppo, carry["state"]))


class WithPlainMetrics(PPO):
    """A PPO with metrics that are no `Metric`: arrays, which count as means."""

    def train_step(self, state, **options):
        state, metrics = super().train_step(state, **options)
        number = state.learner.iteration.astype(jnp.float32)
        return state, {**metrics, "number": number, "pair": jnp.stack([number, number + 1])}


def test_plain_arrays_of_an_agent_are_logged_as_means():
    sizes = {"num_envs": 4, "num_steps": 8, "num_mini_batch": 2, "num_epochs": 1}
    agent = WithPlainMetrics.create(DRIFT, hidden_sizes=(8,), **sizes)
    _, history = agent.train(128, log_interval=64, **QUIET)
    assert history["number"].tolist() == [1.5, 3.5]  # of iterations 1 and 2, then 3 and 4
    assert history["pair"].tolist() == [2.0, 4.0]


def host_ppo(**options):
    pytest.importorskip("gymnasium")
    sizes = {"num_envs": 2, "num_steps": 16, "num_mini_batch": 2, "num_epochs": 1}
    env = make_env("gymnasium:CartPole-v1")
    return PPO.create(env, hidden_sizes=(8,), **sizes, **options)


def test_no_iteration_of_host_environments_compiles_anything(compiled):
    agent = host_ppo(num_actors=2)
    program = programs.make_program(agent, None, "fast")
    carry = program.start(program.init(0))
    before = jax.tree.map(jnp.copy, carry["state"])
    compiled.clear()
    carry = program.advance(carry, 0)
    assert compiled
    assert leaves_equal(carry["state"], before)
    compiled.clear()
    carry = program.advance(carry, 3)
    program.close()
    assert not compiled
    assert carry["state"].learner.iteration == 3


def test_the_running_episodes_of_host_environments_are_truncated_and_counted(tmp_path):
    agent = host_ppo(normalize_rewards=True)
    options = {"checkpoint_dir": tmp_path, "log_interval": 128, **QUIET}
    state, _ = agent.train(32, **options)
    running = np.count_nonzero(state.actors.statistics.episode_length)
    assert running
    assert np.count_nonzero(state.actors.reward_sums)
    program = programs.make_program(agent, None, "fast")
    resumed, cut = program.resume(state)
    program.close()
    assert cut == running
    assert not np.count_nonzero(resumed.actors.reward_sums)
    assert not np.count_nonzero(resumed.actors.statistics.episode_length)
    assert resumed.actors.is_first.all()
    # Stopped before the row is whole and resumed again: both cuts are in the row.
    again, history = agent.train(64, resume=True, **options)
    assert history.to_records()[-1]["cut_episodes"] == running
    running += np.count_nonzero(again.actors.statistics.episode_length)
    _, history = agent.train(192, resume=True, **options)
    cuts = {row["step"]: row.get("cut_episodes") for row in history}
    assert cuts == {128: running, 192: None}


def test_host_environments_train_and_resume(tmp_path):
    agent = host_ppo()
    state, history = agent.train(64, checkpoint_dir=tmp_path, log_interval=32, **QUIET)
    assert history.steps.tolist() == [32, 64]
    assert leaves_equal(agent.load(tmp_path), state)
    again, _ = agent.train(64, log_interval=32, **QUIET)
    assert leaves_equal(again.learner.params, state.learner.params)
    onward, history = agent.train(
        128, checkpoint_dir=tmp_path, resume=True, log_interval=32, **QUIET
    )
    assert onward.learner.iteration == 4
    assert history.steps.tolist() == [32, 64, 96, 128]
    assert np.isfinite(history["loss"]).all()
    assert len(agent.eval(onward, 3)["episode_returns"]) == 3
    with pytest.raises(TypeError, match="runs on the host"):
        agent.init(jax.random.key(0))


def test_host_environments_go_on_from_a_given_or_loaded_state(tmp_path):
    pytest.importorskip("gymnasium")
    agent = small("ppo", make_env("gymnasium:CartPole-v1"), normalize_rewards=True)
    half, _ = agent.train(64, seed=1, **QUIET)
    before = jax.tree.map(jnp.copy, half)
    agent.save(half, tmp_path / "half")
    given, history = agent.train(128, state=half, log_interval=128, **QUIET)
    loaded, _ = agent.train(128, state=agent.load(tmp_path / "half"), **QUIET)
    assert leaves_equal(before, half)
    assert history.steps.tolist() == [128]
    assert given.learner.iteration == 4
    assert given.actors.num_rollouts == 4
    assert leaves_equal(given, loaded)
    assert not jnp.array_equal(
        *(jax.tree.leaves(state.learner.params)[0] for state in (half, given))
    )


def test_rows_that_only_reset_are_told_apart_from_steps():
    pytest.importorskip("gymnasium")
    env = make_env("gymnasium:CartPole-v1", autoreset_mode="NextStep", vectorization_mode="sync")
    agent = small("ppo", env, num_steps=32)
    state, history = agent.train(512, log_interval=512, **QUIET)
    row = history.to_records()[-1]
    assert row["step"] == 512
    # Each end has one such row; of the last ends it may not have come yet.
    ends = count_value(state.learner.num_episodes)
    resets = round((1 - row["valid_fraction"]) * 512)
    assert ends > 4
    assert ends - agent.num_envs <= resets <= ends


def test_steps_taken_are_part_of_the_state(tmp_path):
    options = {"checkpoint_dir": tmp_path, "log_interval": 32, **QUIET}
    small("ppo", DRIFT).train(64, **options)
    shorter = small("ppo", DRIFT, num_steps=4)
    with pytest.warns(CheckpointWarning, match="num_steps = 4, before 8"):
        state, history = shorter.train(96, resume=True, **options)
    assert history.steps.tolist() == [32, 64, 96]
    assert count_value(state.learner.num_env_steps) == 96
    _, history = shorter.train(112, state=state, log_interval=16, **QUIET)
    assert history.steps.tolist() == [112]


def test_a_state_of_other_sizes_is_refused(ppo):
    state = init(small("ppo", DRIFT, num_envs=8), jax.random.key(0))
    with pytest.raises(ValueError, match=r"state must be of .*leaves differ: actors\."):
        ppo.train(64, state=state, **QUIET)


def test_another_environment_is_refused_and_other_options_of_it_are_named(tmp_path):
    options = {"checkpoint_dir": tmp_path, **QUIET}
    small("ppo", make_env("CartPole-v1")).train(32, **options)
    shorter = small("ppo", make_env("CartPole-v1", max_steps_in_episode=5))
    with pytest.warns(CheckpointWarning, match=r"env_options\.max_steps_in_episode = 5, before"):
        shorter.train(64, resume=True, **options)
    with pytest.raises(ValueError, match=r"the run has env CartPole-v1, and goes on with it"):
        preflight.check_same_run(
            {"seed": 0, "env": "CartPole-v1"}, {"seed": 0, "env": "Acrobot-v1"}
        )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_after_a_signal_the_caller_ends_too(ppo, tmp_path, signum, default_hangup):
    def press(event):
        os.kill(os.getpid(), signum)

    kind = KeyboardInterrupt if signum == signal.SIGINT else SystemExit
    with pytest.raises(kind) as error:
        ppo.train(10**9, log_interval=32, checkpoint_dir=tmp_path, callbacks=[press], **QUIET)
    if kind is SystemExit:
        assert error.value.code == 128 + signum
    assert ppo.load(tmp_path).learner.iteration == 1


def test_a_signal_while_an_environment_hangs_saves_what_was_before_it(tmp_path, monkeypatch):
    agent = host_ppo()
    collect, calls = HostCollector.collect, []

    def hang(self, *args):
        calls.append(1)
        if len(calls) == 5:  # the first three only compile
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return collect(self, *args)

    monkeypatch.setattr(HostCollector, "collect", hang)
    monkeypatch.setattr(signals, "BOUND", 0.2)
    with pytest.raises(SystemExit):
        agent.train(10**6, checkpoint_dir=tmp_path, log_interval=32, **QUIET)
    monkeypatch.undo()
    assert agent.load(tmp_path).learner.iteration == 1


def test_a_signal_while_an_evaluation_hangs_saves_and_ends_the_run(tmp_path, monkeypatch):
    agent = host_ppo()

    def hang(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(collectors, "evaluate_host", hang)
    monkeypatch.setattr(signals, "BOUND", 0.2)
    options = {"log_interval": 32, "eval_interval": 32, "num_eval_episodes": 1}
    began = time.monotonic()
    with pytest.raises(SystemExit) as error:
        agent.train(10**6, checkpoint_dir=tmp_path, **options, **QUIET)
    assert time.monotonic() - began < 30
    assert error.value.code == 128 + signal.SIGTERM
    assert agent.load(tmp_path).learner.iteration == 1


def test_the_memory_of_a_container_counts(tmp_path):
    (tmp_path / "memory").mkdir()
    machine = preflight.available_memory(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.available_memory(tmp_path) == machine
    for name in ("memory/memory.limit_in_bytes", "memory.max"):
        (tmp_path / name).write_text("4096\n")
        assert preflight.available_memory(tmp_path) == 4096
        (tmp_path / name).unlink()


@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket/run"])
def test_a_remote_directory_is_refused_before_anything_is_compiled(ppo, path, monkeypatch):
    monkeypatch.setattr(run, "make_program", lambda *a: pytest.fail("too late"))
    for name in ("checkpoint_dir", "init_model_path"):
        with pytest.raises(ValueError, match=f"{name} must be a path on this machine"):
            ppo.train(64, **{name: path}, **QUIET)
    with pytest.raises(ValueError, match="out must be a path on this machine"):
        Config(out=path)
