"""Gymnasium's spaces, actions and ways of resetting, as one contract."""

import contextlib
import multiprocessing
import subprocess
import sys

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces as gym_spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from jaxroll import spaces
from jaxroll.envs import VectorHostEnv, from_gymnasium, make_env
from jaxroll.envs.translate import action_checker, reader, to_space, writer
from tests.envs.scripted import ScriptedGym, ScriptedVector, hand_stepped

MODES = ("SameStep", "NextStep", "Disabled")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.slow), "own"])
def test_steps_equal_an_environment_stepped_by_hand(kind, mode):
    num_envs, num_steps = 3, 25
    if kind == "own":
        vector = ScriptedVector(num_envs, mode)
    elif kind == "async":
        mode_and_context = {"autoreset_mode": AutoresetMode(mode), "context": "forkserver"}
        vector = AsyncVectorEnv([ScriptedGym] * num_envs, **mode_and_context)
    else:
        vector = SyncVectorEnv([ScriptedGym] * num_envs, autoreset_mode=AutoresetMode(mode))
    with VectorHostEnv(vector) as envs:
        assert envs.resets_on_next_step == (mode == "NextStep")
        obs = envs.reset(seed=2).copy()
        assert obs.dtype == np.float32
        actions = np.random.default_rng(0).integers(0, 3, (num_steps, num_envs), np.int32)
        rows = [jax.tree.map(np.array, envs.step(a)) for a in actions]
    for b in range(num_envs):
        hand = hand_stepped(2 + b, actions[:, b], mode == "NextStep")
        next_obs = [*hand["obs"][1:], hand["last_obs"]]
        next_first = [*hand["is_first"][1:], hand["last_is_first"]]
        np.testing.assert_array_equal(obs[b], hand["obs"][0])
        for t, row in enumerate(rows):
            np.testing.assert_array_equal(row.obs[b], next_obs[t])
            assert row.reward[b] == np.float32(hand["reward"][t])
            assert row.terminated[b] == hand["terminated"][t]
            assert row.truncated[b] == hand["truncated"][t]
            assert row.valid[b] == hand["valid"][t]
            assert row.is_first[b] == next_first[t]
            if mode == "NextStep":
                assert row.final_obs is None
            elif row.terminated[b] or row.truncated[b]:
                np.testing.assert_array_equal(row.final_obs[b], hand["final_obs"][t])
    assert rows[0].reward.dtype == np.float32


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (gym_spaces.Discrete(4, start=2), spaces.Discrete(4)),
        (gym_spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete((2, 3))),
        (gym_spaces.MultiBinary(3), spaces.MultiBinary(3)),
        (gym_spaces.Box(-1, 1, (2,), np.float64), spaces.Box.create(-1, 1, (2,))),
        (gym_spaces.Box(0, 255, (4, 8), np.uint8), spaces.Box.create(0, 255, (4, 8), np.uint8)),
        (
            gym_spaces.Tuple([gym_spaces.Discrete(2), gym_spaces.Box(0, 1, (3,))]),
            spaces.Dict.create({"0": spaces.Discrete(2), "1": spaces.Box.create(0, 1, (3,))}),
        ),
        (
            gym_spaces.Dict({"b": gym_spaces.Discrete(2), "a": gym_spaces.MultiBinary(2)}),
            spaces.Dict.create({"a": spaces.MultiBinary(2), "b": spaces.Discrete(2)}),
        ),
    ],
)
def test_spaces_and_their_members_are_translated_both_ways(space, expected):
    assert to_space(space) == expected
    batched = gymnasium.vector.utils.batch_space(space, 5)
    batched.seed(0)
    member = batched.sample()
    ours = reader(space)(member)
    assert expected.contains(ours)
    example = spaces.zeros(expected, (5,))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), ours) == jax.tree.map(
        lambda x: (x.shape, x.dtype), example
    ) or isinstance(expected, spaces.MultiBinary | spaces.Dict)
    if not isinstance(space, gym_spaces.Tuple | gym_spaces.Dict):
        back = writer(space)(action_checker(expected, 5)(ours))
        np.testing.assert_allclose(back, member, rtol=1e-6)
        assert back.dtype == space.dtype


def test_a_space_without_a_fixed_shape_is_refused():
    with pytest.raises(TypeError, match="no translation"):
        to_space(gym_spaces.Text(5))


@pytest.mark.parametrize(
    ("space", "actions", "error", "message"),
    [
        (spaces.Discrete(2), np.zeros(2, int), ValueError, r"shape \(3,\).*got \(2,\)"),
        (spaces.Discrete(2), np.zeros((3, 1), int), ValueError, r"shape \(3,\)"),
        (spaces.Discrete(2), np.zeros(3), TypeError, "must be integers"),
        (spaces.Discrete(2), np.array([0, -1, 0]), ValueError, "got -1 for environment 1"),
        (spaces.MultiDiscrete((2, 3)), np.full((3, 2), 2), ValueError, r"in 0 … 1, got 2"),
        (spaces.MultiBinary(2), np.full((3, 2), 2), ValueError, r"in 0 … 1, got 2"),
        (spaces.Box.create(-1, 1, (2,)), np.zeros((3, 2), int), TypeError, "must be floats"),
        (spaces.Box.create(-1, 1, (2,)), np.zeros((3, 1)), ValueError, r"shape \(3, 2\)"),
        (spaces.Box.create(-1, 1, (2,)), np.full((3, 2), np.nan), ValueError, "finite"),
        (spaces.Box.create(-1, 1, (2,)), np.full((3, 2), 1.5), ValueError, "out_of_range"),
        (spaces.Dict.create({"a": spaces.Discrete(2)}), {"b": np.zeros(3)}, ValueError, "keys"),
    ],
)
def test_wrong_actions_are_refused(space, actions, error, message):
    with pytest.raises(error, match=message):
        action_checker(space, 3, "error")(actions)


def test_box_actions_are_clipped_unless_told_otherwise():
    space = spaces.Box.create(np.array([-1.0, 0.0]), np.array([1.0, 5.0]), (2,))
    clipped = action_checker(space, 2)(np.array([[3.0, -3.0], [0.5, 6.0]], np.float32))
    np.testing.assert_array_equal(clipped, [[1, 0], [0.5, 5]])
    rounding = np.array([[1 + 1e-7, 0.0]], np.float32)
    np.testing.assert_array_equal(action_checker(space, 1, "error")(rounding), [[1, 0]])


def test_wrong_actions_do_not_reach_the_environments_and_leave_them_open():
    with VectorHostEnv(ScriptedVector(2, "SameStep")) as envs:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="environment 1"):
            envs.step(np.array([0, 7]))
        assert envs.step(np.array([0, 1])).valid.all()


def test_an_exception_in_reset_closes_the_environments():
    class Failing(ScriptedVector):
        def reset(self, **kwargs):
            raise KeyError("no such level")

    vector = Failing(2, "SameStep")
    with pytest.raises(KeyError, match="no such level"):
        VectorHostEnv(vector).reset(seed=0)
    assert vector.closed_count == 1


def test_closing_twice_closes_once():
    vector = ScriptedVector(2, "SameStep")
    envs = VectorHostEnv(vector)
    envs.close()
    envs.close()
    assert vector.closed_count == 1


def test_missing_autoreset_metadata_is_an_error_with_a_way_out():
    vector = ScriptedVector(2, "SameStep")
    vector.metadata = {}
    with pytest.raises(ValueError, match="pass autoreset_mode"):
        VectorHostEnv(vector)
    assert not VectorHostEnv(vector, autoreset_mode="SameStep").resets_on_next_step


def test_missing_final_observations_are_an_error():
    class NoFinal(ScriptedVector):
        def step(self, actions):
            *rest, _ = super().step(actions)
            return (*rest, {})

    envs = VectorHostEnv(NoFinal(1, "SameStep"))
    envs.reset(seed=1)  # an episode of one step
    with pytest.raises(RuntimeError, match="final_obs"):
        envs.step(np.array([0]))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            1,
            np.array(["1", "2"]),
            "reward must be a number for each of the 2 environments, got array",
        ),
        (1, np.zeros((2, 1)), "reward must be a number for each"),
        (2, np.array([None, True]), "terminated must be True or False for each of the 2"),
        (2, np.array([np.nan, 0]), "terminated must be True or False"),
        (2, np.zeros(1, bool), "terminated must be True or False for each of the 2"),
        (3, [2, 0], "truncated must be True or False"),
    ],
)
def test_rewards_and_flags_that_numpy_would_cast_are_refused(place, value, message):
    class Wrong(ScriptedVector):
        def step(self, actions):
            out = list(super().step(actions))
            out[place] = value
            return out

    envs = VectorHostEnv(Wrong(2, "NextStep"))
    envs.reset(seed=0)
    with pytest.raises((TypeError, ValueError), match=message):
        envs.step(np.array([0, 1]))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, "1", "reward of .* must be a number, got '1'"),
        (1, np.zeros(1), "reward of .* must be a number"),
        (2, None, "terminated of .* must be True or False, got None"),
        (3, np.nan, "truncated of .* must be True or False, got nan"),
        (2, np.zeros(1, bool), "terminated of .* must be True or False, got array"),
    ],
)
def test_what_the_buffers_of_gymnasium_would_cast_is_refused(place, value, message):
    class Wrong(ScriptedGym):
        def step(self, action):
            out = list(super().step(action))
            out[place] = value
            return tuple(out)

    envs = VectorHostEnv(SyncVectorEnv([Wrong] * 2))
    envs.reset(seed=0)
    with pytest.raises(TypeError, match=message):
        envs.step(np.array([0, 1]))


def test_environments_left_open_are_closed_before_the_interpreter_ends():
    code = (
        "import gymnasium\n"
        "from jaxroll.envs import VectorHostEnv\n"
        "class Own(gymnasium.vector.SyncVectorEnv):\n"
        "    def close_extras(self, **kwargs): print('closed', flush=True)\n"
        "envs = VectorHostEnv(Own([lambda: gymnasium.make('CartPole-v1')]))\n"
        "print('end', flush=True)"
    )
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, check=True, capture_output=True, text=True, timeout=120).stdout
    assert out.split() == ["end", "closed"]


def test_specs_are_values_with_spaces_and_keep_nothing_open():
    spec = make_env("gymnasium:CartPole-v1")
    assert spec == make_env("gymnasium:CartPole-v1")
    assert hash(spec) == hash(make_env("gymnasium:CartPole-v1"))
    assert spec != make_env("gymnasium:CartPole-v1", sutton_barto_reward=True)
    assert spec.action_space == spaces.Discrete(2)
    assert spec.observation_space.shape == (4,)


def test_the_vector_form_of_an_environment_is_preferred():
    with make_env("gymnasium:CartPole-v1").make(3) as envs:
        assert type(envs._envs).__name__ == "CartPoleVectorEnv"
        assert envs.resets_on_next_step
    with make_env("gymnasium:CartPole-v1", vectorization_mode="sync").make(3) as envs:
        assert isinstance(envs._envs, SyncVectorEnv)
        assert not envs.resets_on_next_step  # every row is experience
    with make_env("gymnasium:Acrobot-v1", autoreset_mode="NextStep").make(3) as envs:
        assert envs.resets_on_next_step


def test_settings_are_checked_when_the_environment_is_named():
    with pytest.raises(ValueError, match='Add vectorization_mode="sync"'):
        make_env("gymnasium:CartPole-v1", autoreset_mode="SameStep")
    with pytest.raises(ValueError, match="autoreset_mode must be one of"):
        make_env("gymnasium:Acrobot-v1", autoreset_mode="never")
    with pytest.raises(ValueError, match="vectorization_mode must be"):
        make_env("gymnasium:Acrobot-v1", vectorization_mode="threads")
    with pytest.raises(ValueError, match=r"cannot be made with gravitas=3: .*unexpected keyword"):
        make_env("gymnasium:CartPole-v1", gravitas=3)
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        make_env("gymnasium:CartPole-v1").make(0)


def test_a_function_makes_a_spec():
    spec = from_gymnasium(lambda n: ScriptedVector(n, "Disabled"))
    assert spec.observation_space == spaces.Box.create(0, 10, (2,))
    with spec.make(4) as envs:
        assert envs.reset(seed=0).shape == (4, 2)


def test_a_seed_decides_every_observation():
    def play(seed):
        with make_env("gymnasium:Acrobot-v1").make(3) as envs:
            return [envs.reset(seed), *(envs.step(np.array([0, 1, 2])).obs for _ in range(5))]

    np.testing.assert_array_equal(play(5), play(5))
    assert not np.array_equal(play(5), play(6))


@pytest.mark.slow
def test_asynchronous_environments_are_made_by_name():
    with make_env("gymnasium:Acrobot-v1", vectorization_mode="async").make(2) as envs:
        assert isinstance(envs._envs, AsyncVectorEnv)
        assert envs.reset(seed=0).shape == (2, 6)
        assert envs.step(np.array([0, 1])).valid.all()


@pytest.mark.long
def test_mujoco_half_cheetah_steps_in_float32():
    pytest.importorskip("mujoco")
    spec = make_env("gymnasium:HalfCheetah-v5")
    assert spec.observation_space.dtype == np.float32
    assert spec.action_space == spaces.Box.create(-1, 1, (6,))
    with spec.make(2) as envs:
        envs.reset(seed=0)
        for _ in range(1000):
            step = envs.step(np.full((2, 6), 2.0, np.float32))
    assert step.truncated.all()
    assert step.is_first.all()
    assert step.final_obs.dtype == np.float32
    assert not np.array_equal(step.obs, step.final_obs)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])  # ALE has no other
def test_ale_breakout_rows_agree_in_every_mode(mode):
    pytest.importorskip("ale_py")
    options = {"max_num_frames_per_episode": 200, "repeat_action_probability": 0.0}
    options |= {"noop_max": 0, "use_fire_reset": False}  # resets are then all alike
    spec = make_env("gymnasium:ALE/Breakout-v5", autoreset_mode=mode, **options)
    assert spec.observation_space == spaces.Box.create(0, 255, (4, 84, 84), np.uint8)
    with spec.make(2) as envs:
        first = envs.reset(seed=0).copy()
        rows = [jax.tree.map(np.array, envs.step(np.array([0, 3], np.int32))) for _ in range(120)]
    ends = [t for t, row in enumerate(rows) if row.truncated.all()]
    assert len(ends) >= 2
    length = ends[0] + 1
    final = rows[ends[0]].obs if mode == "NextStep" else rows[ends[0]].final_obs
    start = rows[length] if mode == "NextStep" else rows[ends[0]]
    assert start.is_first.all()
    np.testing.assert_array_equal(start.obs[:, -1], first[:, -1])
    assert not np.array_equal(final, start.obs)
    assert ends[1] - ends[0] == length + (mode == "NextStep")
    if mode == "NextStep":
        assert not rows[length].valid.any()
        assert rows[length + 1].valid.all()


@pytest.mark.parametrize("method", ["fork", "forkserver", None])
def test_forked_workers_are_warned_of(method):
    class Process:
        _start_method = method

    envs = ScriptedVector(2, "SameStep")
    envs.processes = [Process()]
    default = method or multiprocessing.get_start_method()
    expected = (
        pytest.warns(RuntimeWarning, match="context=.forkserver")
        if default == "fork"
        else contextlib.nullcontext()
    )
    with expected:
        VectorHostEnv(envs)
