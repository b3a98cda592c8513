"""`check_env` finds what breaks the contract, and says what."""

import dataclasses
import random

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import PPO, spaces
from jaxroll.collectors import HostCollector
from jaxroll.envs import (
    FrameStack,
    HostEnv,
    HostStep,
    TimeLimit,
    VectorHostEnv,
    autoreset,
    check_env,
    from_gymnasium,
    make_env,
)
from jaxroll.networks import make_policy
from jaxroll.types import TimeStep
from tests.envs.scripted import ScriptedGym, ScriptedJax, ScriptedVector

TINY = {"num_envs": 2, "num_steps": 4, "num_mini_batch": 1, "num_epochs": 1, "hidden_sizes": (4,)}


@dataclasses.dataclass(frozen=True)
class Counter:
    """Counts to three, then starts again; each fault is one that was seen in the wild."""

    fault: str = ""
    action_space = spaces.Discrete(2)

    @property
    def observation_space(self):
        if self.fault == "space":
            return gymnasium.spaces.Box(0, 3, (1,))
        box = spaces.Box(0, 2 if self.fault == "outside" else 3, (1,))
        if "mask" in self.fault:
            return spaces.Dict({"action_mask": spaces.MultiBinary(2), "count": box})
        return box

    def observe(self, state):
        dtype = jnp.int32 if self.fault == "dtype" else jnp.float32
        obs = jnp.full((2 if self.fault == "shape" else 1,), state, dtype)
        if "mask" in self.fault:
            allowed = jnp.array([True, False]) & (self.fault == "mask")
            obs = {"action_mask": allowed | (state < 2), "count": obs}
        return obs

    def reset(self, key):
        state = jnp.int32(0)
        return (
            (state, self.observe(state), 1) if self.fault == "reset" else (state, self.observe(0))
        )

    def step(self, key, state, action):
        noise = random.random() if self.fault == "random" else 0.0
        count = state + 1
        ended = count == 3
        final = self.observe(count)
        after = count if self.fault == "stays" else jnp.where(ended, 0, count)
        obs = self.observe(after)
        reward = jnp.where(ended & (self.fault == "nan"), jnp.nan, 1.0 + noise)
        reward = reward[None] if self.fault == "reward" else reward
        flag = ended.astype(jnp.int32) if self.fault == "flag" else ended
        state = after.astype(jnp.float32) if self.fault == "state" else after
        return state, TimeStep(obs, reward, flag, jnp.zeros_like(flag), final)


@pytest.mark.parametrize(
    "env",
    [
        Counter(),
        Counter("mask"),
        autoreset(ScriptedJax()),
        TimeLimit(Counter(), max_steps=2),
        FrameStack(Counter(), num_frames=2),
        "CartPole-v1",
    ],
)
def test_right_environments_pass(env):
    check_env(env)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("space", "observation_space of Counter must be a space of jaxroll.spaces"),
        ("reset", r"reset of Counter must return \(state, obs\), got 3 values"),
        ("shape", r"obs of Counter.reset must be float32\[1\] .* got float32\[2\]"),
        ("dtype", r"obs of Counter.reset must be float32\[1\] .* got int32\[1\]"),
        ("state", "state of Counter must keep its dtype, but is int32 after reset and float32"),
        ("reward", r"reward of Counter.step must be a float of shape \(\), got float32\[1\]"),
        ("flag", r"terminated of Counter.step must be a bool .* got int32"),
        ("nan", "reward that is NaN"),
        ("random", "not deterministic"),
        ("stays", r"not the first of a new episode. .*autoreset\(env\)"),
        ("mask that forbids", "forbids every action"),
    ],
)
def test_faults_are_named(fault, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_env(Counter(fault))


def test_observations_outside_their_space_are_warned_of():
    with pytest.warns(UserWarning, match="outside of its observation_space"):
        check_env(Counter("outside"))


def test_a_run_checks_shapes_before_anything_else():
    agent = dataclasses.replace(PPO.create(Counter(), **TINY), env=Counter("flag"))
    with pytest.raises(TypeError, match=r"terminated of .* must be a bool"):
        agent.train(16, progress="silent")


class Faulty(ScriptedGym):
    """One environment of Gymnasium with a fault."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault

    def reset(self, **options):
        obs, info = super().reset(**options)
        return (obs * np.nan if self.fault == "nan" else obs), info

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.fault == "random":
            obs = obs * 0 + random.random()
        return obs, np.inf if self.fault == "reward" else reward, *rest


def faulty(fault):
    return from_gymnasium(
        lambda num_envs: gymnasium.vector.SyncVectorEnv([lambda: Faulty(fault)] * num_envs)
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "reset of VectorHostEnv gave an observation that is NaN"),
        ("reward", "step of VectorHostEnv gave a reward that is NaN or infinite"),
        ("random", "not deterministic"),
    ],
)
def test_faults_of_host_environments_are_named(fault, message):
    with pytest.raises(ValueError, match=message):
        check_env(faulty(fault), num_steps=20)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_right_host_environments_pass(mode):
    check_env(from_gymnasium(lambda num_envs: ScriptedVector(num_envs, mode)), num_steps=30)
    check_env(faulty(""), num_steps=30)
    with VectorHostEnv(ScriptedVector(2, mode)) as envs:
        check_env(envs, num_steps=10)
        envs.reset(seed=0)  # still open


@pytest.mark.parametrize("name", ["gymnasium:CartPole-v1", "gymnasium:Pendulum-v1"])
def test_host_environments_by_name_pass(name):
    check_env(name, num_steps=50)


class Hand(HostEnv):
    """A user's own, whose flags are of the wrong dtype."""

    num_envs, resets_on_next_step = 2, False
    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def __init__(self, obs_shape=(2, 1)):
        self.obs = np.zeros(obs_shape, np.float32)

    def reset(self, seed):
        return self.obs

    def step(self, actions):
        no = np.zeros(2, np.int32)
        return HostStep(self.obs, np.zeros(2, np.float32), no, no, None, no == 0, no == 1)

    def close(self):
        pass


def test_a_run_checks_the_first_reset_and_step_of_host_environments():
    envs = Hand()
    policy = make_policy(envs.observation_space, envs.action_space, hidden_sizes=(4,))
    collector = HostCollector(envs, policy)
    actor = collector.init(jax.random.key(0))
    params = policy.init(jax.random.key(1), actor.obs)
    with pytest.raises(TypeError, match=r"terminated of Hand must be bool\[2\], got int32\[2\]"):
        collector.collect(params, actor, 3)
    with pytest.raises(TypeError, match=r"obs of reset of Hand must be float32\[2, 1\]"):
        HostCollector(Hand((2,)), policy).init(jax.random.key(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": 3}, "must be an environment"),
        ({"num_steps": -1}, "num_steps must be at least 0"),
        ({"seed": "a"}, "seed must be an integer"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_env(**{"env": make_env("CartPole-v1"), "num_steps": 0, **arguments})
