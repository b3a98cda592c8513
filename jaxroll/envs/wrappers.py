"""Wrappers around an `Env`, each an `Env` again: pure, frozen, equal if made alike.

What a wrapper remembers lives in the state. Since the environment resets itself inside, a wrapper
sees the first observation of the next episode as `step.obs` and the successor as
`step.final_obs`, and treats each as what it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import spaces
from jaxroll.checks import check_count, check_number
from jaxroll.envs.base import MASK, Draws, SameSpaces, draw, select, time_limit
from jaxroll.envs.make import as_device_env
from jaxroll.types import Node, PyTree, TimeStep


@dataclasses.dataclass(frozen=True)
class Wrapper(SameSpaces):
    """The base to write wrappers from: it passes on whatever a subclass does not change.

    Override `observation`, `action` or `reward` for what needs no memory and nothing random, or
    else `reset` and `step`. With a `step` of its own, a wrapper that does not change when episodes
    are truncated should state so, by the environment's `time_limit`: it makes `collect` cheaper.

    Example, a wrapper that makes every step cost a little:
      >>> from jaxroll.envs import make_env
      >>> @dataclasses.dataclass(frozen=True)
      ... class StepCost(Wrapper):
      ...     cost: float = 0.01
      ...
      ...     def reward(self, reward):
      ...         return reward - self.cost
      >>> StepCost(make_env("CartPole-v1")).action_space
      Discrete(n=2, dtype=dtype('int32'))
    """

    env: Any

    def __post_init__(self):
        instead = (
            "wrappers of its own, and give the result: jaxroll.envs.from_gymnasium(lambda "
            "num_envs: wrapped vector environment)"
        )
        object.__setattr__(self, "env", as_device_env(self.env, instead))

    @property
    def time_limit(self) -> float | None:
        """The environment's own; None (not known) for a subclass with a `step` of its own."""
        return time_limit(self.env) if type(self).step is Wrapper.step else None

    def observation(self, obs: PyTree) -> PyTree:
        """What the policy sees for an observation of the environment."""
        return obs

    def action(self, action: PyTree) -> PyTree:
        """What the environment gets for an action of the policy."""
        return action

    def reward(self, reward: jax.Array) -> jax.Array:
        """What the learner gets for a reward of the environment."""
        return reward

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Start an episode: (state, obs)."""
        state, obs = self.env.reset(key)
        return state, self.observation(obs)

    def draw(self, key: jax.Array) -> PyTree:
        """The environment's own draws; the key itself for a subclass with a `step` of its own."""
        return draw(self.env, key) if type(self).step is Wrapper.step else key

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> tuple[PyTree, TimeStep]:
        """Take one step: (state, time step)."""
        state, step = self.env.step(key, state, self.action(action))
        obs, final_obs = self.observation(step.obs), self.observation(step.final_obs)
        return state, step.replace(obs=obs, final_obs=final_obs, reward=self.reward(step.reward))


class WrapperState(Node):
    """The environment's state and what a wrapper adds to it."""

    env: PyTree
    memory: PyTree


@dataclasses.dataclass(frozen=True)
class TimeLimit(Wrapper):
    """Truncate an episode after `max_steps` steps, and start the next.

    Example:
      >>> from jaxroll.envs import make_env
      >>> env = TimeLimit(make_env("Pendulum-v1"), max_steps=1)
      >>> state, obs = env.reset(jax.random.key(0))
      >>> _, step = env.step(jax.random.key(1), state, jnp.zeros(1))
      >>> bool(step.truncated)
      True
    """

    max_steps: int

    def __post_init__(self):
        super().__post_init__()
        check_count("max_steps", self.max_steps)

    @property
    def time_limit(self) -> int | None:
        """The lower of `max_steps` and the environment's own limit, if that is known."""
        inner = time_limit(self.env)
        return None if inner is None else int(min(inner, self.max_steps))

    def reset(self, key: jax.Array) -> tuple[WrapperState, PyTree]:
        """Start an episode with the clock at 0."""
        state, obs = self.env.reset(key)
        return WrapperState(state, jnp.int32(0)), obs

    def draw(self, key: jax.Array) -> Draws:
        """The environment's own, and the start of an episode for when the time is up."""
        step_key, reset_key = jax.random.split(key)
        return Draws(draw(self.env, step_key), *self.env.reset(reset_key))

    def step(self, key: Any, state: WrapperState, action: PyTree):
        """Take one step; at the limit, reset."""
        draws = key if isinstance(key, Draws) else self.draw(key)
        env_state, step = self.env.step(draws.step, state.env, action)
        elapsed = state.memory + 1
        over = elapsed >= self.max_steps
        inner_done = step.terminated | step.truncated
        # Where the environment has reset itself already, its own new episode goes on.
        cut = over & ~inner_done
        env_state = select(cut, draws.reset_state, env_state, "state")
        obs = select(cut, draws.reset_obs, step.obs, "observation")
        elapsed = jnp.where(over | inner_done, 0, elapsed)
        step = step.replace(obs=obs, truncated=step.truncated | over)
        return WrapperState(env_state, elapsed), step


@dataclasses.dataclass(frozen=True)
class FlattenObservation(Wrapper):
    """Observations as one float32 vector: a dict's parts in the order of its keys.

    Discrete observations become one-hot. A dict's "action_mask" is no observation: it stays, beside
    the vector, which is then called "observation".

    Example:
      >>> from jaxroll.envs import make_env
      >>> env = make_env("Breakout-MinAtar")
      >>> env.observation_space.shape, FlattenObservation(env).observation_space.shape
      ((10, 10, 4), (400,))
    """

    @property
    def observation_space(self) -> spaces.Space:
        """A vector; unbounded, unless the observation is a single bounded array."""
        space = self.env.observation_space
        if isinstance(space, spaces.Box):
            low, high = (bound.ravel() for bound in space.bounds())
            return spaces.Box(low, high, low.shape)
        size = jax.eval_shape(functools.partial(_flatten, space), spaces.zeros(space)).size
        vector = spaces.Box(-np.inf, np.inf, (size,))
        if isinstance(space, spaces.Dict) and MASK in space.spaces:
            return spaces.Dict({MASK: space.spaces[MASK], "observation": vector})
        return vector

    def observation(self, obs: PyTree) -> PyTree:
        """The vector, beside the mask if there is one."""
        vector = _flatten(self.env.observation_space, obs)
        if isinstance(obs, dict) and MASK in obs:
            return {MASK: obs[MASK], "observation": vector}
        return vector


def _flatten(space: spaces.Space, obs: PyTree) -> jax.Array:
    if isinstance(space, spaces.Dict):
        parts = [_flatten(child, obs[name]) for name, child in space.items if name != MASK]
        return jnp.concatenate(parts)
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(obs, space.n, dtype=jnp.float32)
    return jnp.ravel(obs).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class FrameStack(Wrapper):
    """The last `num_frames` observations, along the last axis, the newest last.

    An episode starts with its first observation in every place. Images [H, W, C] become
    [H, W, C · num_frames]; vectors [D] become [D · num_frames].

    Example:
      >>> from jaxroll.envs import make_env
      >>> FrameStack(make_env("CartPole-v1"), num_frames=3).observation_space.shape
      (12,)
    """

    num_frames: int

    def __post_init__(self):
        super().__post_init__()
        check_count("num_frames", self.num_frames)

    @property
    def observation_space(self) -> spaces.Box:
        """The environment's, with the last axis `num_frames` times as long."""
        space = self.env.observation_space
        if not isinstance(space, spaces.Box) or not space.shape:
            raise TypeError(
                f"FrameStack needs observations in a Box with at least one axis, got {space}. "
                "Use FlattenObservation first."
            )
        low, high = (np.concatenate([b] * self.num_frames, -1) for b in space.bounds())
        return spaces.Box(low, high, low.shape, space.dtype)

    @property
    def time_limit(self) -> float | None:
        """The environment's own."""
        return time_limit(self.env)

    def draw(self, key: jax.Array) -> PyTree:
        """The environment's own."""
        return draw(self.env, key)

    def reset(self, key: jax.Array) -> tuple[WrapperState, jax.Array]:
        """Start an episode."""
        state, obs = self.env.reset(key)
        frames = self._first(obs)
        return WrapperState(state, frames), frames

    def step(self, key: jax.Array, state: WrapperState, action: PyTree):
        """Take one step; the oldest frame goes."""
        env_state, step = self.env.step(key, state.env, action)
        size = step.obs.shape[-1]
        final = jnp.concatenate([state.memory[..., size:], step.final_obs], -1)
        frames = jnp.where(step.terminated | step.truncated, self._first(step.obs), final)
        return WrapperState(env_state, frames), step.replace(obs=frames, final_obs=final)

    def _first(self, obs: jax.Array) -> jax.Array:
        return jnp.concatenate([obs] * self.num_frames, -1)


@dataclasses.dataclass(frozen=True)
class ClipAction(Wrapper):
    """Any action is accepted; the environment receives the nearest within its bounds.

    The policy's own action is what is stored, so that its log-probability stays right.

    Example:
      >>> from jaxroll.envs import make_env
      >>> env = make_env("Pendulum-v1")
      >>> env.action_space.is_bounded, ClipAction(env).action_space.is_bounded
      (True, False)
    """

    @property
    def action_space(self) -> spaces.Box:
        """The environment's shape, unbounded."""
        space = _bounded(self)
        return spaces.Box(-np.inf, np.inf, space.shape, space.dtype)

    def action(self, action: jax.Array) -> jax.Array:
        """The nearest within the bounds."""
        return jnp.clip(action, *_bounded(self).bounds()).astype(action.dtype)


@dataclasses.dataclass(frozen=True)
class RescaleAction(Wrapper):
    """Actions between `low` and `high` (−1 and 1), stretched to the environment's bounds.

    Example:
      >>> from jaxroll.envs import make_env
      >>> RescaleAction(make_env("Pendulum-v1")).action_space.high
      1.0
    """

    low: float = -1.0
    high: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        _check_low_high(self.low, self.high)

    @property
    def action_space(self) -> spaces.Box:
        """The environment's shape, between `low` and `high`."""
        space = _bounded(self)
        return spaces.Box(self.low, self.high, space.shape, space.dtype)

    def action(self, action: jax.Array) -> jax.Array:
        """The action, stretched."""
        low, high = _bounded(self).bounds()
        scale = ((high - low) / (self.high - self.low)).astype(action.dtype)
        stretched = (action - self.low) * scale + low.astype(action.dtype)
        return jnp.clip(stretched, low, high).astype(action.dtype)


def _check_low_high(low: float, high: float) -> None:
    if not check_number("low", low) < check_number("high", high):
        raise ValueError(f"low must be less than high, got {low} and {high}.")


def _bounded(wrapper: Wrapper) -> spaces.Box:
    space = wrapper.env.action_space
    if not isinstance(space, spaces.Box) or not space.is_bounded:
        raise TypeError(f"{type(wrapper).__name__} needs a bounded Box of actions, got {space}.")
    return space


@dataclasses.dataclass(frozen=True)
class ScaleReward(Wrapper):
    """Rewards times `scale`."""

    scale: float

    def __post_init__(self):
        super().__post_init__()
        check_number("scale", self.scale)

    def reward(self, reward: jax.Array) -> jax.Array:
        """The reward, scaled."""
        return reward * self.scale


@dataclasses.dataclass(frozen=True)
class ClipReward(Wrapper):
    """Rewards between `low` and `high`."""

    low: float = -1.0
    high: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        _check_low_high(self.low, self.high)

    def reward(self, reward: jax.Array) -> jax.Array:
        """The reward, clipped."""
        return jnp.clip(reward, self.low, self.high)
