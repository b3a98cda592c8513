"""Wrappers keep terminated, truncated and the final observation apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import spaces
from jaxroll.envs import (
    ClipAction,
    ClipReward,
    FlattenObservation,
    FrameStack,
    RescaleAction,
    ScaleReward,
    TimeLimit,
    Wrapper,
    autoreset,
    make_env,
)
from jaxroll.envs.base import draw


@dataclasses.dataclass(frozen=True)
class Walk:
    """The observation is how far one has walked; the end is at `end`."""

    end: int = 5
    observation_space = spaces.Box.create(0, 100, (1,))
    action_space = spaces.Box.create(np.array([-2.0]), np.array([6.0]), (1,))

    def reset(self, key):
        return jnp.float32(0), jnp.zeros(1)

    def step(self, key, state, action):
        state = state + action[0]
        return state, state[None], state, state >= self.end


def run(env, actions):
    state, obs = env.reset(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), len(actions))
    actions = jnp.asarray(actions, jnp.float32)[:, None]
    scan = jax.jit(lambda s: jax.lax.scan(lambda s, x: env.step(x[0], s, x[1]), s, (keys, actions)))
    return obs, scan(state)[1]


WALK = autoreset(Walk())


def test_time_limit_truncates_and_starts_again():
    _, rows = run(TimeLimit(WALK, 3), [1, 1, 1, 1, 4, 1, 1, 3, 1])
    np.testing.assert_array_equal(rows.truncated, [0, 0, 1, 0, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(rows.terminated, [0, 0, 0, 0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(rows.final_obs[:, 0], [1, 2, 3, 1, 5, 1, 2, 5, 1])
    np.testing.assert_array_equal(rows.obs[:, 0], [1, 2, 0, 1, 0, 1, 2, 0, 1])


def test_time_limit_of_one_step_ends_every_step():
    _, rows = run(TimeLimit(WALK, 1), [1, 5, 1])
    assert rows.truncated.all()
    np.testing.assert_array_equal(rows.terminated, [0, 1, 0])
    np.testing.assert_array_equal(rows.obs[:, 0], [0, 0, 0])


def test_frame_stack_keeps_the_old_episode_in_the_final_observation():
    obs, rows = run(FrameStack(WALK, 3), [1, 1, 4, 2])
    np.testing.assert_array_equal(obs, [0, 0, 0])
    np.testing.assert_array_equal(rows.obs, [[0, 0, 1], [0, 1, 2], [0, 0, 0], [0, 0, 2]])
    np.testing.assert_array_equal(rows.final_obs, [[0, 0, 1], [0, 1, 2], [1, 2, 6], [0, 0, 2]])
    assert FrameStack(WALK, 3).observation_space.shape == (3,)


def test_frames_of_images_are_stacked_as_channels():
    env = FrameStack(make_env("Breakout-MinAtar"), 2)
    assert env.observation_space.shape == (10, 10, 8)
    assert env.reset(jax.random.key(0))[1].shape == (10, 10, 8)


def test_clip_action_accepts_anything():
    env = ClipAction(WALK)
    assert not env.action_space.is_bounded
    _, rows = run(env, [-7, 3, 99])
    np.testing.assert_array_equal(rows.final_obs[:, 0], [-2, 1, 7])


def test_rescale_action_stretches_to_the_bounds():
    env = RescaleAction(WALK)
    assert env.action_space == spaces.Box.create(-1, 1, (1,))
    _, rows = run(env, [-1, 0, 0.5, 1])
    np.testing.assert_array_equal(rows.final_obs[:, 0], [-2, 0, 4, 10])


def test_rewards_are_scaled_and_clipped():
    _, rows = run(ScaleReward(WALK, 0.5), [1, 2])
    np.testing.assert_array_equal(rows.reward, [0.5, 1.5])
    _, rows = run(ClipReward(WALK, -1.0, 2.0), [-2, 1, 4])
    np.testing.assert_array_equal(rows.reward, [-1, -1, 2])


@dataclasses.dataclass(frozen=True)
class DictEnv:
    observation_space = spaces.Dict.create(
        {
            "image": spaces.Box.create(0, 9, (2, 2), np.uint8),
            "kind": spaces.Discrete(3),
            "action_mask": spaces.MultiBinary(2),
        }
    )
    action_space = spaces.Discrete(2)

    def observe(self, state):
        image = jnp.full((2, 2), state, jnp.uint8)
        return {"image": image, "kind": state, "action_mask": jnp.array([1, 0])}

    def reset(self, key):
        return jnp.int32(0), self.observe(jnp.int32(0))

    def step(self, key, state, action):
        return state + 1, self.observe(state + 1), 1.0, state >= 1


def test_flattened_dicts_keep_the_action_mask_beside_the_vector():
    env = FlattenObservation(autoreset(DictEnv()))
    state, obs = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs["observation"], [0, 0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(obs["action_mask"], [1, 0])
    assert env.observation_space.spaces["observation"].shape == (7,)
    state, _ = env.step(jax.random.key(1), state, jnp.int32(0))
    state, step = env.step(jax.random.key(2), state, jnp.int32(0))
    np.testing.assert_array_equal(step.final_obs["observation"], [2, 2, 2, 2, 0, 0, 1])
    np.testing.assert_array_equal(step.obs["observation"], [0, 0, 0, 0, 1, 0, 0])


def test_flattened_arrays_keep_their_bounds():
    env = FlattenObservation(make_env("Breakout-MinAtar"))
    assert env.observation_space == spaces.Box.create(0, 1, (400,))
    assert env.reset(jax.random.key(0))[1].shape == (400,)


def test_wrappers_stack_and_compare_by_value():
    def make():
        return FrameStack(TimeLimit(RescaleAction(make_env("Pendulum-v1")), 4), 2)

    env = make()
    assert env == make()
    assert hash(env) == hash(make())
    assert env != FrameStack(TimeLimit(RescaleAction(make_env("Pendulum-v1")), 5), 2)
    states, obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    keys = jax.random.split(jax.random.key(1), (9, 3))
    step = jax.vmap(env.step)
    _, rows = jax.jit(lambda s: jax.lax.scan(lambda s, k: step(k, s, jnp.zeros((3, 1))), s, keys))(
        states
    )
    assert obs.shape == (3, 6)
    np.testing.assert_array_equal(rows.truncated[:, 0], [0, 0, 0, 1, 0, 0, 0, 1, 0])
    # A new episode starts with its first observation in both places.
    np.testing.assert_array_equal(rows.obs[3, :, :3], rows.obs[3, :, 3:])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TimeLimit(WALK, 0), ValueError, "max_steps must be at least 1"),
        (lambda: FrameStack(WALK, 0), ValueError, "num_frames must be at least 1"),
        (lambda: RescaleAction(WALK, 1.0, -1.0), ValueError, "low must be less than high"),
        (lambda: ClipAction(make_env("CartPole-v1")).action_space, TypeError, "bounded Box"),
        (lambda: FrameStack(autoreset(DictEnv()), 2).observation_space, TypeError, "Flatten"),
        (lambda: TimeLimit(make_env("gymnasium:CartPole-v1"), 5), TypeError, "from_gymnasium"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "env",
    [
        make_env("CartPole-v1", max_steps_in_episode=3),
        autoreset(Walk()),
        TimeLimit(make_env("CartPole-v1"), max_steps=2),
        ScaleReward(FrameStack(autoreset(Walk(end=2)), 2), 2.0),
    ],
    ids=lambda env: type(env).__name__,
)
def test_a_step_with_what_was_drawn_ahead_is_the_step_with_the_key(env):
    state, _ = env.reset(jax.random.key(0))
    action = jnp.asarray(spaces.zeros(env.action_space)) + 1
    step = jax.jit(env.step)
    for i in range(6):
        key = jax.random.key(i)
        by_draws = step(draw(env, key), state, action)
        by_key = state, _ = step(key, state, action)
        for x, y in zip(jax.tree.leaves(by_draws), jax.tree.leaves(by_key), strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_wrapper_of_ones_own_gets_a_key():
    @dataclasses.dataclass(frozen=True)
    class Sticky(Wrapper):
        def step(self, key, state, action):
            stay_key, key = jax.random.split(key)
            action = jnp.where(jax.random.bernoulli(stay_key, 0.25), 0, action)
            return self.env.step(key, state, action)

    key = jax.random.key(0)
    assert draw(Sticky(make_env("CartPole-v1")), key) is key
