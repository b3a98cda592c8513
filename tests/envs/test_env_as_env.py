"""Whatever is at hand is taken for an environment, or the error names the way."""

import gymnasium
import gymnax
import jax
import numpy as np
import pytest

from jaxroll import PPO, spaces
from jaxroll.collectors import collect, evaluate, evaluate_host, init_actor
from jaxroll.envs import (
    ClipReward,
    FrameStack,
    HostEnv,
    HostEnvSpec,
    ScaleReward,
    TimeLimit,
    as_env,
    autoreset,
    make_env,
)
from jaxroll.networks import make_policy
from tests.envs.scripted import ScriptedGym, ScriptedJax, ScriptedVector

TINY = {"num_envs": 2, "num_steps": 4, "num_mini_batch": 1, "num_epochs": 1, "hidden_sizes": (4,)}


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        gymnax.make("CartPole-v1")[0],
        gymnax.make("CartPole-v1"),
        make_env("CartPole-v1"),
    ],
)
def test_gymnax_is_taken_by_name_or_as_it_is(env):
    assert PPO.create(env, **TINY).env.action_space == spaces.Discrete(2)
    policy = make_policy(as_env(env).observation_space, as_env(env).action_space)
    actor = jax.eval_shape(lambda k: init_actor(env, policy, k, 2), jax.random.key(0))
    params = jax.eval_shape(lambda k, o: policy.init(k, o), jax.random.key(1), actor.obs)
    _, rollout = jax.eval_shape(lambda p, a: collect(env, policy, p, a, 3), params, actor)
    assert rollout.transition.obs.shape == (3, 2, 4)


@pytest.mark.parametrize(
    "env",
    [
        gymnasium.make("CartPole-v1"),
        lambda: gymnasium.make("CartPole-v1"),
        lambda num_envs: gymnasium.make_vec("CartPole-v1", num_envs=num_envs),
    ],
)
def test_gymnasium_is_taken_as_an_environment_or_a_function(env):
    agent = PPO.create(env, **TINY)
    assert isinstance(agent.env, HostEnvSpec)
    with agent.env.make(3) as envs:
        assert envs.reset(seed=0).shape == (3, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ScriptedVector(2, "SameStep"),
        lambda: [ScriptedGym(), ScriptedGym()],
        lambda: [ScriptedGym, ScriptedGym],
    ],
)
def test_open_environments_are_stepped_but_not_made_anew(make):
    envs = as_env(make())
    assert isinstance(envs, HostEnv)
    assert envs.reset(seed=1).shape == (2, 2)
    assert envs.step(np.array([0, 1])).reward.shape == (2,)
    with pytest.raises(TypeError, match="from_gymnasium"):
        PPO.create(make(), **TINY)


def test_a_single_environment_that_cannot_be_made_again_is_refused():
    with pytest.raises(TypeError, match="Give a function that makes one"):
        as_env(ScriptedGym())


def test_an_environment_that_stops_at_its_end_is_told_of_autoreset():
    with pytest.raises(TypeError, match=r"got 5 values. .*autoreset\(env\)"):
        PPO.create(ScriptedJax(), **TINY)
    assert as_env(autoreset(ScriptedJax())) == autoreset(ScriptedJax())


@pytest.mark.parametrize("env", [3, None, ScriptedJax, {"env": 1}, object(), []])
def test_what_is_no_environment_is_refused(env):
    with pytest.raises(TypeError, match=r"must (be an environment|list Gymnasium)"):
        as_env(env)
    with pytest.raises(TypeError, match=r"must (be an environment|list Gymnasium)"):
        TimeLimit(env, max_steps=3)


def test_wrappers_take_names_and_raw_environments():
    for env in ("Pendulum-v1", gymnax.make("Pendulum-v1")):
        wrapped = FrameStack(TimeLimit(env, max_steps=3), num_frames=2)
        assert wrapped.observation_space.shape == (6,)
    with pytest.raises(TypeError, match=r"runs on the host, .*from_gymnasium"):
        TimeLimit("gymnasium:CartPole-v1", max_steps=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TimeLimit("CartPole-v1", max_steps=1.5), "max_steps must be an integer"),
        (lambda: FrameStack("CartPole-v1", num_frames=True), "num_frames must be an integer"),
        (lambda: ScaleReward("CartPole-v1", scale=np.nan), "scale must be a number"),
        (lambda: ClipReward("CartPole-v1", low=1.0, high=0.0), "low must be less than high"),
    ],
)
def test_wrappers_refuse_what_cannot_be_meant(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_host_environments_are_told_of_the_host_functions():
    spec = make_env("gymnasium:CartPole-v1")
    policy = make_policy(spec.observation_space, spec.action_space)
    with pytest.raises(TypeError, match="HostCollector"):
        init_actor(spec, policy, jax.random.key(0), 2)
    with pytest.raises(TypeError, match="evaluate_host"):
        evaluate(spec, policy, (), jax.random.key(0), num_episodes=1)


def test_names_and_raw_environments_are_evaluated():
    agent = PPO.create("CartPole-v1", **TINY)
    policy = agent.policy
    params = policy.init(jax.random.key(0), np.zeros((1, 4), np.float32))
    raw = gymnasium.make("CartPole-v1")
    result = evaluate_host(raw, policy, params, jax.random.key(1), num_episodes=2)
    assert result.is_complete.all()
    state = jax.jit(agent.init)(jax.random.key(0))
    for env in ("gymnasium:CartPole-v1", "CartPole-v1"):
        assert agent.eval(state, num_episodes=2, env=env)["num_unfinished"] == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spaces.Discrete(0), "n of Discrete must be at least 1"),
        (lambda: spaces.Discrete("3"), "must be an integer"),
        (lambda: spaces.MultiDiscrete(3), "list of counts"),
        (lambda: spaces.MultiBinary(True), "must be an integer"),
        (lambda: spaces.Box(1.0, 0.0, (2,)), "must not be above"),
        (lambda: spaces.Box(0, np.nan, (2,)), "must be numbers"),
        (lambda: spaces.Box(np.zeros(3), 1.0, (2,)), "must be a number or have its shape"),
        (lambda: spaces.Box("0", 1), "array of real numbers"),
        (lambda: spaces.Box(False, True, (2,)), "low of a Box must be numbers, got False"),
        (lambda: spaces.Box(0, 1, 64), "shape of a Box must be a tuple"),
        (lambda: spaces.Box(0, 1, (0,)), "shape of a Box must be at least 1"),
        (lambda: spaces.Dict([1]), "mapping of spaces"),
        (lambda: spaces.Dict({"a": 3}), "names and spaces"),
    ],
)
def test_spaces_that_cannot_be_meant_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_spaces_are_made_from_arrays_and_mappings():
    low, high = np.array([-1.0, 0.0]), np.array([1.0, 5.0])
    assert spaces.Box(low, high) == spaces.Box.create(low, high, (2,))
    both = {"b": spaces.Discrete(2), "a": spaces.Box(0, 1, (3,))}
    assert spaces.Dict(both) == spaces.Dict.create(both)
    assert hash(spaces.Dict(both)) == hash(spaces.Dict.create(both))
