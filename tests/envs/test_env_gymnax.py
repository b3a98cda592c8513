"""gymnax environments equal gymnax's own `step`; older styles fit too."""

import dataclasses
import subprocess
import sys
from functools import partial

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import spaces
from jaxroll.envs import from_gymnax, make_env
from jaxroll.envs.gymnax import _is_built_in, names

OFFLINE = [name for name in names() if name != "MNISTBandit-bsuite"]  # that one needs a download
PLAIN = (
    "CartPole-v1",
    "Pendulum-v1",
    "Breakout-MinAtar",
    "DeepSea-bsuite",  # has a step of its own
    "FourRooms-misc",  # the space says float32, the observations are int32
)


def test_all_names_of_gymnax_are_known_without_importing_it():
    assert set(names()) == set(gymnax.registered_envs)
    assert all(_is_built_in(name) for name in gymnax.registered_envs)
    assert not _is_built_in("CartPole")


def compare_with_gymnax(name, num_envs=3, num_steps=120):
    """Both step from the same state with the same key; ours goes on."""
    env = make_env(name)
    own, params = gymnax.make(name)

    def step(state, key):
        action_key, key = jax.random.split(key)
        actions = jax.vmap(env.action_space.sample)(jax.random.split(action_key, num_envs))
        keys = jax.random.split(key, num_envs)
        with jax.numpy_rank_promotion("allow"):
            obs, own_state, reward, terminated, truncated, info = jax.vmap(
                lambda k, s, a: own.step(k, s, a, params)
            )(keys, state, actions)
        expected = (obs, own_state, reward, terminated, truncated, info["final_observation"])
        state, row = jax.vmap(env.step)(keys, state, actions)
        got = (row.obs, state, row.reward, row.terminated, row.truncated, row.final_obs)
        return state, (expected, got)

    keys = jax.random.split(jax.random.key(0), num_envs)
    state, obs = jax.jit(jax.vmap(env.reset))(keys)
    with jax.numpy_rank_promotion("allow"):
        own_obs, own_state = jax.jit(jax.vmap(lambda k: own.reset(k, params)))(keys)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, (state, obs), (own_state, own_obs))
    scan = jax.jit(lambda s: jax.lax.scan(step, s, jax.random.split(jax.random.key(1), num_steps)))
    _, (expected, got) = scan(state)
    jax.tree.map(close, got, expected)
    assert got[2].dtype == jnp.float32
    example = spaces.zeros(env.observation_space, (num_envs,))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), obs) == jax.tree.map(
        lambda x: (x.shape, x.dtype), example
    )


@pytest.mark.parametrize("name", PLAIN)
def test_rows_equal_those_of_gymnax(name):
    compare_with_gymnax(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OFFLINE if name not in PLAIN])
def test_rows_equal_those_of_gymnax_everywhere(name):
    compare_with_gymnax(name)


def test_options_reach_the_constructor_and_the_parameters():
    env = make_env("MemoryChain-bsuite", memory_length=2, num_bits=3)
    assert env.observation_space.shape == (5,)
    state, _ = env.reset(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 6)
    _, rows = jax.lax.scan(lambda s, k: env.step(k, s, jnp.int32(0)), state, keys)
    np.testing.assert_array_equal(rows.terminated, [False, False, True] * 2)
    short = make_env("CartPole-v1", max_steps_in_episode=2)
    state, _ = short.reset(jax.random.key(0))
    _, rows = jax.lax.scan(lambda s, k: short.step(k, s, jnp.int32(0)), state, keys)
    np.testing.assert_array_equal(rows.truncated, [False, True] * 3)
    assert not rows.terminated.any()


def test_an_unknown_option_is_an_error_with_near_matches():
    with pytest.raises(ValueError, match=r"no option 'memory_lenth'. Did you mean 'memory_length'"):
        make_env("MemoryChain-bsuite", memory_lenth=3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("CartPole-v1", {"max_steps_in_episode": "abc"}, "must be an integer, got 'abc'"),
        ("CartPole-v1", {"max_steps_in_episode": True}, "must be an integer, got True"),
        ("CartPole-v1", {"max_steps_in_episode": 0}, "must be at least 1, got 0"),
        ("BernoulliBandit-misc", {"max_steps_in_episode": -1.0}, "must be (at least|>=) 1"),
        ("CartPole-v1", {"gravity": float("nan")}, "must be a number, got nan"),
        ("CartPole-v1", {"gravity": [9.8]}, "must be a number"),
        ("MemoryChain-bsuite", {"memory_length": 2.5}, "must be an integer, got 2.5"),
        ("PointRobot-misc", {"dense_reward": 1}, "must be True or False, got 1"),
        ("Acrobot-v1", {"available_torque": [1.0, 2.0]}, r"of shape \(3,\), got \[1.0, 2.0\]"),
        (
            "Catch-bsuite",
            {"rows": 0},
            "Catch-bsuite cannot be made with rows=0: rows must be at least 1",
        ),
        ("FrozenLake-misc", {"map_name": "9x9"}, "cannot be made with map_name='9x9': map_name"),
        ("FourRooms-misc", {"pos_fixed": [1]}, r"cannot be made with pos_fixed=\[1\]"),
    ],
)
def test_an_option_of_the_wrong_kind_is_told_when_the_environment_is_made(name, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_env(name, **options)


def test_environments_compare_by_name_and_options():
    assert make_env("CartPole-v1") == make_env("gymnax:CartPole-v1")
    assert hash(make_env("CartPole-v1")) == hash(make_env("CartPole-v1"))
    assert make_env("CartPole-v1", gravity=9.0) == make_env("CartPole-v1", gravity=9.0)
    assert make_env("CartPole-v1", gravity=9.0) != make_env("CartPole-v1")
    torque = np.array([-1.0, 0.0, 1.0])
    acrobot = make_env("Acrobot-v1", available_torque=torque)
    assert acrobot == make_env("Acrobot-v1", available_torque=torque.copy())
    assert acrobot != make_env("Acrobot-v1", available_torque=2 * torque)
    assert len({acrobot, make_env("Acrobot-v1")}) == 2


def test_first_use_inside_jit_leaks_no_tracer():
    # An option that no other test has, so that the environment is built within the trace.
    env = make_env("MetaMaze-misc", reward=7.5)
    obs = jax.jit(lambda key: env.reset(key)[1])(jax.random.key(0))
    again = jax.jit(lambda key: env.reset(key)[1] + 0)(jax.random.key(0))
    np.testing.assert_array_equal(obs, again)


def test_naming_an_environment_touches_no_device():
    code = (
        "import jaxroll.envs; env = jaxroll.envs.make_env('CartPole-v1'); hash(env); repr(env)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@dataclasses.dataclass(frozen=True)
class OldParams:
    max_steps_in_episode: int = 4
    end: int = 6


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OldState:
    time: jax.Array
    position: jax.Array


class OldStyle:
    """Before gymnax 1.0: five values, one done that includes the time limit."""

    default_params = OldParams()

    def observation_space(self, params):
        return gymnax.environments.spaces.Box(0, 100, (1,))

    def action_space(self, params):
        return gymnax.environments.spaces.Discrete(3)

    def reset_env(self, key, params):
        state = OldState(jnp.int32(0), jnp.int32(0))
        return self.get_obs(state), state

    def get_obs(self, state):
        return state.position[None].astype(jnp.float32)

    def step_env(self, key, state, action, params):
        state = OldState(state.time + 1, state.position + action)
        done = (state.position >= params.end) | (state.time >= params.max_steps_in_episode)
        return self.get_obs(state), state, jnp.float32(1), done, {}

    def reset(self, key, params):
        return self.reset_env(key, params)

    def step(self, key, state, action, params):
        obs, state, reward, done, info = self.step_env(key, state, action, params)
        reset_obs, reset_state = self.reset_env(key, params)
        pick = jax.tree.map(lambda x, y: jnp.where(done, x, y), reset_state, state)
        return jnp.where(done, reset_obs, obs), pick, reward, done, info


class OldStyleStepOnly:
    """The same with nothing but `reset` and `step`: the final observation is lost."""

    def __init__(self):
        inner = OldStyle()
        self.default_params = inner.default_params
        self.reset, self.step = inner.reset, inner.step
        self.observation_space, self.action_space = inner.observation_space, inner.action_space


def run(env, actions):
    state, _ = env.reset(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), len(actions))
    scan = jax.lax.scan(lambda s, x: env.step(x[0], s, x[1]), state, (keys, jnp.array(actions)))
    return scan[1]


def test_the_old_five_values_are_terminated_unless_the_time_is_up():
    rows = run(from_gymnax(OldStyle()), [1, 1, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(rows.terminated, [0, 0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(rows.truncated, [0, 0, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(rows.final_obs[:, 0], [1, 2, 3, 4, 2, 4, 6])
    np.testing.assert_array_equal(rows.obs[:, 0], [1, 2, 3, 0, 2, 4, 0])


def test_where_the_final_observation_is_lost_every_end_is_terminal():
    rows = run(from_gymnax(OldStyleStepOnly()), [1, 1, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(rows.terminated, [0, 0, 0, 1, 0, 0, 1])
    assert not rows.truncated.any()


def test_from_gymnax_takes_parameters_and_compares_them_by_value():
    own, params = gymnax.make("Pendulum-v1")
    env = from_gymnax(own, params.replace(max_steps_in_episode=2))
    assert env == from_gymnax(own, params.replace(max_steps_in_episode=2))
    assert env != from_gymnax(own)
    state, _ = env.reset(jax.random.key(0))
    state, first = env.step(jax.random.key(1), state, jnp.zeros(1))
    state, second = env.step(jax.random.key(2), state, jnp.zeros(1))
    assert (bool(first.truncated), bool(second.truncated)) == (False, True)
