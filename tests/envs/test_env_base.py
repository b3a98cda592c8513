"""`autoreset` and the user's own environment."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import spaces
from jaxroll.envs import autoreset
from jaxroll.envs.base import time_step
from tests.envs.scripted import NUM_ACTIONS, ScriptedJax


@dataclasses.dataclass(frozen=True)
class WithTimeStep(ScriptedJax):
    def step(self, key, state, action):
        state, obs, reward, terminated, truncated = super().step(key, state, action)
        return state, time_step(obs, reward, terminated, truncated, {"more": reward * 2})


@pytest.mark.parametrize("single", [ScriptedJax(), WithTimeStep()])
def test_autoreset_rows_equal_an_environment_stepped_by_hand(single):
    env, num_envs, num_steps = autoreset(single), 5, 40
    key = jax.random.key(0)
    reset_keys = jax.random.split(key, num_envs)
    step_keys = jax.random.split(jax.random.fold_in(key, 1), (num_steps, num_envs))
    actions = jax.random.randint(jax.random.fold_in(key, 2), (num_steps, num_envs), 0, NUM_ACTIONS)

    def step(state, inputs):
        return jax.vmap(env.step)(inputs[0], state, inputs[1])

    state, first_obs = jax.vmap(env.reset)(reset_keys)
    _, rows = jax.jit(lambda s: jax.lax.scan(step, s, (step_keys, actions)))(state)
    assert (rows.terminated & rows.truncated).any()
    assert (rows.truncated & ~rows.terminated).any()
    assert ((rows.terminated | rows.truncated)[1:] & (rows.terminated | rows.truncated)[:-1]).any()
    reset, hand_step = jax.jit(ScriptedJax().reset), jax.jit(ScriptedJax().step)
    for b in range(num_envs):
        state, obs = reset(reset_keys[b])
        np.testing.assert_array_equal(first_obs[b], obs)
        for t in range(num_steps):
            step_key, reset_key = jax.random.split(step_keys[t, b])
            out = hand_step(step_key, state, actions[t, b])
            state, obs, reward, terminated, truncated = out
            np.testing.assert_array_equal(rows.final_obs[t, b], obs)
            assert rows.reward[t, b] == reward
            assert rows.terminated[t, b] == terminated
            assert rows.truncated[t, b] == truncated
            if terminated or truncated:
                state, obs = reset(reset_key)
            np.testing.assert_array_equal(rows.obs[t, b], obs)


@dataclasses.dataclass(frozen=True)
class Counter:
    """As little as a user has to write; an int reward, a weakly typed state, no truncation."""

    end: int = 3
    observation_space = spaces.Discrete(4)
    action_space = spaces.Discrete(2)

    def reset(self, key):
        return jnp.int32(0), jnp.int32(0)

    def step(self, key, state, action):
        return state + 1, state + 1, 1, state + 1 >= self.end


def test_four_values_are_enough_and_dtypes_are_normalised():
    env = autoreset(Counter())
    state, _ = env.reset(jax.random.key(0))
    _, rows = jax.lax.scan(
        lambda s, k: env.step(k, s, jnp.int32(0)), state, jax.random.split(jax.random.key(1), 7)
    )
    np.testing.assert_array_equal(rows.obs, [1, 2, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(rows.final_obs, [1, 2, 3, 1, 2, 3, 1])
    assert rows.reward.dtype == jnp.float32
    assert not rows.truncated.any()
    assert rows.truncated.dtype == bool


def test_environments_made_alike_share_a_compilation():
    traces = []

    def run(env, key):
        traces.append(env)
        return env.reset(key)

    program = jax.jit(run, static_argnums=0)
    program(autoreset(Counter(3)), jax.random.key(0))
    program(autoreset(Counter(3)), jax.random.key(1))
    assert len(traces) == 1
    program(autoreset(Counter(4)), jax.random.key(1))
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda s: (s, s, 1.0), TypeError, "got 3 values"),
        (lambda s: s, TypeError, "step must return"),
        (lambda s: (s, s), TypeError, "or .state, jaxroll.types.TimeStep., got 2 values"),
        (lambda s: ({"a": s}, s, 1.0, True), ValueError, "state must have the same structure"),
        (lambda s: (s, s[None], 1.0, True), ValueError, "observation must have the same shape"),
    ],
)
def test_a_wrong_step_is_explained(returned, error, message):
    @dataclasses.dataclass(frozen=True)
    class Wrong(Counter):
        def step(self, key, state, action):
            return returned(state)

    with pytest.raises(error, match=message):
        autoreset(Wrong()).reset(jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Drift:
    """Starts and goes on with the given values; the state is also the observation."""

    start: object
    add: object
    observation_space = spaces.Box.create(-9, 9, ())
    action_space = spaces.Discrete(2)

    def reset(self, key):
        return {"x": jnp.asarray(self.start)}, jnp.float32(0)

    def step(self, key, state, action):
        return {"x": state["x"] + self.add}, jnp.float32(0), 0.0, False


def test_a_float_step_after_an_integer_reset_is_refused_by_the_name_of_its_leaf():
    env = autoreset(Drift(0, 0.1))
    with pytest.raises(
        TypeError, match=r"state\['x'\] must keep its dtype, but is int32 after rese"
    ):
        env.reset(jax.random.key(0))


@pytest.mark.parametrize(
    ("start", "add", "dtype"),
    [
        (np.int8(0), np.int32(1), np.int32),
        (np.float32(0), np.int32(1), np.float32),
        (False, np.int32(1), np.int32),
    ],
)
def test_a_reset_that_is_narrower_than_a_step_is_widened(start, add, dtype):
    env = autoreset(Drift(start, add))
    state, _ = env.reset(jax.random.key(0))
    assert state["x"].dtype == dtype
    keys = jax.random.split(jax.random.key(1), 3)
    state, _ = jax.lax.scan(lambda s, k: env.step(k, s, jnp.int32(0)), state, keys)
    assert state["x"] == 3


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Counter, "a class: make one of it"),
        (3, "got int without observation_space, action_space, reset, step"),
    ],
)
def test_what_is_no_environment_is_refused(env, message):
    with pytest.raises(TypeError, match=message):
        autoreset(env)


def test_an_environment_must_be_hashable():
    class Unhashable(Counter):
        __hash__ = None  # pyright: ignore

    with pytest.raises(TypeError, match="frozen=True"):
        autoreset(Unhashable())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            (1.0, jnp.zeros(1, bool)),
            r"terminated must be a single value, of shape \(\), got .* \(1,\)",
        ),
        ((jnp.zeros(2), True), r"reward must be a single value"),
        ((1.0, jnp.nan), "terminated must be True or False, got float"),
        ((1.0, None), "terminated must be"),
        (("1", True), "reward must be"),
    ],
)
def test_rewards_and_flags_of_the_wrong_kind_are_refused(returned, message):
    @dataclasses.dataclass(frozen=True)
    class Wrong(Counter):
        def step(self, key, state, action):
            return state, state, *returned

    with pytest.raises((TypeError, ValueError), match=message):
        autoreset(Wrong()).reset(jax.random.key(0))
