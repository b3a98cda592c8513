"""Evaluation plays exactly the episodes that it promised, whatever their lengths."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import spaces
from jaxroll.collectors import (
    EvaluationResult,
    collect,
    evaluate,
    evaluate_host,
    init_actor,
)
from jaxroll.collectors.evaluate import _play_all
from jaxroll.distributions import Categorical
from jaxroll.envs import make_env
from jaxroll.envs.base import HostEnv, HostEnvSpec, HostStep
from jaxroll.networks import make_policy
from jaxroll.types import PolicyOutput, TimeStep
from tests.tiers import plain

run = jax.jit(collect, static_argnums=(0, 1, 4))


@dataclasses.dataclass(frozen=True)
class Lottery:
    """Each step ends the episode with a probability drawn at its start: lengths vary wildly."""

    short: float = 0.9
    long: float = 0.02
    observation_space = spaces.Box.create(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, key):
        chance = jnp.where(jax.random.bernoulli(key), self.short, self.long)
        return chance, jnp.zeros(1)

    def step(self, key, chance, action):
        end_key, reset_key = jax.random.split(key)
        terminated = jax.random.bernoulli(end_key, chance)
        fresh, obs = self.reset(reset_key)
        step = TimeStep(obs, jnp.float32(1) + action, terminated, jnp.zeros((), bool), obs)
        return jnp.where(terminated, fresh, chance), step


@dataclasses.dataclass(frozen=True)
class Lopsided:
    """Action 1 has probability sigmoid(params); the carry counts the steps of the episode."""

    def initial_carry(self, batch_size):
        return jnp.full(batch_size, -5.0)

    def apply(self, params, carry, obs, is_first):
        carry = jnp.where(is_first, 0, carry) + 1
        logits = jnp.stack([jnp.zeros_like(carry), jnp.zeros_like(carry) + params], -1)
        return carry, PolicyOutput(Categorical(logits), carry)

    def value(self, params, carry, obs, is_first):
        return self.apply(params, carry, obs, is_first)[1].value


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Episodes of lengths 2, 3, 4, 2, 3, 4, …, ended in turn by either flag; reward = length."""

    observation_space = spaces.Box.create(0, 9, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, key):
        return (jnp.int32(0), jnp.int32(0)), jnp.zeros(1)

    def step(self, key, state, action):
        episode, t = state
        length = 2 + episode % 3
        done = t + 1 == length
        state = (episode + done, jnp.where(done, 0, t + 1))
        obs = jnp.zeros(1)
        truncated = done & (episode % 2 == 1)
        step = TimeStep(obs, length.astype(jnp.float32), done & ~truncated, truncated, obs)
        return state, step


@dataclasses.dataclass(frozen=True)
class Paid(Fixed):
    """The reward is the action."""

    def step(self, key, state, action):
        state, step = super().step(key, state, action)
        return state, step.replace(reward=action.astype(jnp.float32))


def test_every_environment_plays_its_quota():
    result = evaluate(Fixed(), Lopsided(), 0.0, jax.random.key(0), num_episodes=11, num_envs=4)
    # episodes 0-3 are the environments' first, 4-7 their second, 8-10 the third of three
    assert result.episode_length.tolist() == [2] * 4 + [3] * 4 + [4] * 3
    assert result.episode_return.tolist() == [4.0] * 4 + [9.0] * 4 + [16.0] * 3
    assert result.is_complete.all()
    assert int(result.num_unfinished) == 0
    np.testing.assert_allclose(result.mean_length, np.mean([2] * 4 + [3] * 4 + [4] * 3))


@pytest.mark.parametrize("num_envs", [1, 7, 50, None, 300])
def test_the_number_of_episodes_is_exact(num_envs):
    result = evaluate(Fixed(), Lopsided(), 0.0, jax.random.key(0), num_episodes=50,
                      num_envs=num_envs)  # fmt: skip
    assert result.episode_return.shape == (50,)
    assert result.is_complete.all()


def test_lengths_are_distributed_as_those_of_independent_episodes():
    env, num_episodes = Lottery(), 4000
    result = evaluate(
        env, Lopsided(), 0.0, jax.random.key(0), num_episodes=num_episodes, num_envs=500
    )
    lengths = np.asarray(result.episode_length)
    assert result.is_complete.all()
    mean = (1 / env.short + 1 / env.long) / 2
    assert abs(lengths.mean() - mean) < 5 * lengths.std() / np.sqrt(num_episodes)
    # P(length = 1) = (0.9 + 0.02) / 2; the first ends to come would have far more of them
    share = (lengths == 1).mean()
    assert abs(share - 0.46) < 5 * np.sqrt(0.46 * 0.54 / num_episodes)
    # Independent episodes: one by one, each from its own reset.
    alone = jax.vmap(
        lambda key: evaluate(env, Lopsided(), 0.0, key, num_episodes=1).episode_length[0]
    )(jax.random.split(jax.random.key(1), 2000))
    quantiles = [0.25, 0.45, 0.55, 0.75, 0.9]
    got, want = np.quantile(lengths, quantiles), np.quantile(alone, quantiles)
    np.testing.assert_allclose(got, want, rtol=0.3)


def test_stochastic_evaluation_samples_and_deterministic_takes_the_mode():
    env, key = Paid(), jax.random.key(0)
    mode = evaluate(env, Lopsided(), -1.0, key, num_episodes=300)
    assert not mode.episode_return.any()
    sampled = evaluate(env, Lopsided(), -1.0, key, num_episodes=300, deterministic=False)
    share = float(sampled.episode_return.sum() / sampled.episode_length.sum())
    assert abs(share - 1 / (1 + np.e)) < 0.08
    again = evaluate(env, Lopsided(), -1.0, key, num_episodes=300, deterministic=False)
    np.testing.assert_array_equal(sampled.episode_return, again.episode_return)


def test_unfinished_episodes_are_reported():
    env = Lottery(short=0.0, long=0.0)
    result = evaluate(env, Lopsided(), 0.0, jax.random.key(0), num_episodes=6, num_envs=4,
                      max_steps=9)  # fmt: skip
    assert int(result.num_unfinished) == 6
    assert result.episode_length.tolist() == [9, 9, 9, 9, 0, 0]
    assert np.isnan(result.mean_return)
    some = evaluate(Fixed(), Lopsided(), 0.0, jax.random.key(0), num_episodes=6, num_envs=2,
                    max_steps=6)  # fmt: skip
    assert some.is_complete.tolist() == [True] * 4 + [False] * 2
    assert some.episode_length.tolist() == [2, 2, 3, 3, 1, 1]
    assert float(some.mean_return) == (4 + 9) / 2


def test_one_compilation_serves_all_params_keys_and_limits():
    traces = []

    @dataclasses.dataclass(frozen=True)
    class Traced(Lopsided):
        def apply(self, params, carry, obs, is_first):
            traces.append(1)
            return super().apply(params, carry, obs, is_first)

    for seed in range(3):
        evaluate(Fixed(), Traced(), jnp.float32(seed), jax.random.key(seed), num_episodes=4,
                 max_steps=100 + seed)  # fmt: skip
    once = len(traces)
    evaluate(Fixed(), Traced(), jnp.float32(9), jax.random.key(9), num_episodes=4, max_steps=7)
    assert len(traces) == once
    assert once <= 2  # a while_loop may look at its body twice


@pytest.mark.parametrize("num_envs", [4, 6])
def test_episodes_spread_over_devices_are_those_of_one(num_envs):
    mesh = jax.make_mesh((4,), ("actors",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {"num_episodes": 11, "num_envs": num_envs}
    key = jax.random.key(0)
    alone = evaluate(Lottery(), Lopsided(), 0.0, key, **options)
    spread = evaluate(Lottery(), Lopsided(), 0.0, key, **options, mesh=mesh)
    chex.assert_trees_all_equal(spread, alone)
    # No device waits for another: the slowest may take minutes longer.
    program = _play_all.lower(
        Lottery(), Lopsided(), 0.0, key, 100, **options, deterministic=True, mesh=mesh
    ).compile()
    collective = r"all-(gather|reduce|to-all)|collective-permute"
    assert not re.search(collective, program.as_text())
    # Actions that are drawn differ from device to device.
    mesh = jax.make_mesh((2,), ("actors",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {"num_episodes": 2, "deterministic": False, "mesh": mesh}
    drawn = [evaluate(Paid(), Lopsided(), 0.0, jax.random.key(i), **options) for i in range(8)]
    assert any(x.episode_return[0] != x.episode_return[1] for x in drawn)


def test_vmap_over_params_equals_solo_runs():
    params, key = jnp.array([-1.0, 0.0, 1.0]), jax.random.key(0)

    def one(p):
        return evaluate(Lottery(), Lopsided(), p, key, num_episodes=5, deterministic=False)

    batched = jax.vmap(one)(params)
    for i in range(3):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y), batched, one(params[i]))


GYMNAX = {  # name → the length of every episode, if it is known
    "CartPole-v1": None,
    "Pendulum-v1": 200,
    "MountainCarContinuous-v0": 999,
    "Breakout-MinAtar": None,
    "MemoryChain-bsuite": None,
}


@pytest.mark.parametrize("name", plain(GYMNAX, ["MemoryChain-bsuite", "MountainCarContinuous-v0"]))
def test_gymnax_environments_collect_and_evaluate_with_the_default_networks(name):
    env = make_env(name)
    network = "lstm" if name.startswith("Memory") else "auto"
    policy = make_policy(env.observation_space, env.action_space, network=network)
    actor = init_actor(env, policy, jax.random.key(0), 4)
    params = policy.init(jax.random.key(1), actor.obs)
    ended = 0
    for _ in range(2):
        actor, rollout = run(env, policy, params, actor, 16)
        rows = rollout.transition
        ended += int(rollout.episodes.count)
        assert rows.obs.shape == (16, 4, *env.observation_space.shape)
        assert rows.action.shape == (16, 4, *env.action_space.shape)
        assert all(np.isfinite(x).all() for x in (rows.obs, rows.reward, rows.log_prob, rows.value))
    assert ended == 0 or GYMNAX[name] is None
    result = evaluate(env, policy, params, jax.random.key(2), num_episodes=3)
    assert result.is_complete.all()
    assert np.isfinite(result.episode_return).all()
    assert (result.episode_length > 0).all()
    if GYMNAX[name] is not None:
        assert result.episode_length.tolist() == [GYMNAX[name]] * 3


class HostFixed(HostEnv):
    """The `Fixed` environment on the host, in either way of resetting."""

    observation_space, action_space = Fixed.observation_space, Fixed.action_space

    def __init__(self, num_envs, resets_on_next_step):
        self.num_envs, self.resets_on_next_step = num_envs, resets_on_next_step
        self.is_closed = False
        self.seeds = []

    def reset(self, seed):
        self.seeds.append(seed)
        self.episode = np.zeros(self.num_envs, int)
        self.t = np.zeros(self.num_envs, int)
        self.ended = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 1), np.float32)

    def step(self, actions):
        assert actions.shape == (self.num_envs,)
        valid = ~self.ended if self.resets_on_next_step else np.ones(self.num_envs, bool)
        length = 2 + self.episode % 3
        self.t = np.where(valid, self.t + 1, 0)
        done = valid & (self.t == length)
        truncated = done & (self.episode % 2 == 1)
        is_first = ~valid if self.resets_on_next_step else done
        self.episode = self.episode + done
        self.t = np.where(done, 0, self.t)
        self.ended = done
        obs = np.zeros((self.num_envs, 1), np.float32)
        reward = np.where(valid, length, 0).astype(np.float32)
        final = None if self.resets_on_next_step else obs
        return HostStep(obs, reward, done & ~truncated, truncated, final, valid, is_first)

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("resets_on_next_step", [False, True])
def test_host_environments_play_the_same_episodes(resets_on_next_step):
    env = HostFixed(4, resets_on_next_step)
    got = evaluate_host(env, Lopsided(), 0.0, jax.random.key(0), num_episodes=11)
    want = evaluate(Fixed(), Lopsided(), 0.0, jax.random.key(0), num_episodes=11, num_envs=4)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not env.is_closed
    assert all(0 <= seed < 2**31 for seed in env.seeds)
    few = evaluate_host(env, Lopsided(), 0.0, jax.random.key(0), num_episodes=2, max_steps=1)
    assert few.episode_length.tolist() == [1, 1]
    assert int(few.num_unfinished) == 2


def test_a_spec_of_host_environments_is_opened_and_closed():
    opened = []

    @dataclasses.dataclass(frozen=True)
    class Spec(HostEnvSpec):
        observation_space = Fixed.observation_space
        action_space = Fixed.action_space

        def make(self, num_envs):
            opened.append(HostFixed(num_envs, True))
            return opened[-1]

    result = evaluate_host(Spec(), Lopsided(), 0.0, jax.random.key(0), num_episodes=5, num_envs=2)
    assert result.episode_length.tolist() == [2, 2, 3, 3, 4]
    assert [env.num_envs for env in opened] == [2]
    assert opened[0].is_closed


def test_gymnasium_cartpole_evaluates_on_the_host():
    pytest.importorskip("gymnasium")
    spec = make_env("gymnasium:CartPole-v1")
    policy = make_policy(spec.observation_space, spec.action_space)
    params = policy.init(jax.random.key(0), spaces.zeros(spec.observation_space, (1,)))
    result = evaluate_host(
        spec, policy, params, jax.random.key(1), num_episodes=3, num_envs=2, deterministic=False
    )
    assert result.is_complete.all()
    np.testing.assert_array_equal(result.episode_return, result.episode_length)


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="num_episodes must be at least 1, got 0"):
        evaluate(Fixed(), Lopsided(), 0.0, jax.random.key(0), num_episodes=0)
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        evaluate(Fixed(), Lopsided(), 0.0, jax.random.key(0), num_episodes=1, num_envs=0)
    with pytest.raises(ValueError, match="that of the open environments, 4, got 3"):
        evaluate_host(HostFixed(4, True), Lopsided(), 0.0, jax.random.key(0), num_episodes=1,
                      num_envs=3)  # fmt: skip


def test_results_are_a_pytree():
    result = EvaluationResult(jnp.zeros(3), jnp.zeros(3, jnp.int32), jnp.zeros(3, bool))
    assert len(jax.tree.leaves(result)) == 3
