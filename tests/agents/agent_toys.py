"""Tiny environments whose values are known, and the agents that are tried on them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import A2C, DAAC, IMPALA, PPO, spaces
from jaxroll.envs import autoreset


@dataclasses.dataclass(frozen=True)
class Clock:
    """Two kinds of episodes of 3 steps, drawn at reset.

    Kind 0 shows the time, earns 1 a step and is terminated: V(t) = Σ γᵏ over what is left.
    Kind 1 shows nothing, earns 2 a step and is truncated: V = 2 / (1 − γ), as if it never ended.
    """

    observation_space = spaces.Box.create(0, 1, (4,))
    action_space = spaces.Discrete(2)

    def reset(self, key):
        state = (jax.random.bernoulli(key), jnp.int32(0))
        return state, self.observe(state)

    def observe(self, state):
        endless, time = state
        return jax.nn.one_hot(jnp.where(endless, 3, jnp.minimum(time, 2)), 4)

    def step(self, key, state, action):
        endless, time = state
        state = (endless, time + 1)
        over = time + 1 == 3
        reward = jnp.where(endless, 2.0, 1.0)
        return state, self.observe(state), reward, over & ~endless, over & endless

    @staticmethod
    def values(discount):
        """V of the four observations."""
        terminated = [sum(discount**k for k in range(3 - t)) for t in range(3)]
        return np.array([*terminated, 2 / (1 - discount)])


@dataclasses.dataclass(frozen=True)
class Drift:
    """Observations (origin, time) that no two episodes share; ends of both kinds.

    What follows (origin, time) is always (origin, time + 0.1): the final observation of a
    truncated step is known from the step itself.
    """

    observation_space = spaces.Box.create(-10, 10, (2,))
    action_space = spaces.Discrete(3)

    def reset(self, key):
        obs = jnp.stack([jax.random.normal(key), 0.0])
        return obs, obs

    def step(self, key, obs, action):
        end, how = jax.random.uniform(key, (2,))
        reward = obs[0] + 0.5 * action - obs[1]
        obs = self.successor(obs)
        over = end < 0.3
        return obs, obs, reward, over & (how < 0.5), over & (how >= 0.5)

    @staticmethod
    def successor(obs):
        return obs + jnp.broadcast_to(jnp.array([0.0, 0.1]), obs.shape)


@dataclasses.dataclass(frozen=True)
class AnySpaces:
    """Random observations and a reward of noise: whatever the spaces, something to learn from."""

    observation_space: Any
    action_space: Any

    def reset(self, key):
        return jnp.int32(0), self.observe(key)

    def observe(self, key):
        obs = self.observation_space.sample(key)
        if isinstance(obs, dict) and "action_mask" in obs:
            # Action 0 is never allowed, action 1 always.
            mask = obs["action_mask"].at[0].set(False).at[1].set(True)
            obs = {**obs, "action_mask": mask}
        return obs

    def step(self, key, time, action):
        obs_key, reward_key = jax.random.split(key)
        reward = jax.random.normal(reward_key)
        if isinstance(self.observation_space, spaces.Dict):
            # What a mask forbids must not come: it would be seen in the return.
            reward = jnp.where(action == 0, jnp.nan, reward)
        return time + 1, self.observe(obs_key), reward, False, time + 1 >= 5


@dataclasses.dataclass(frozen=True)
class Poison:
    """Rewards are NaN from a step of each episode on."""

    after: int = 10

    observation_space = spaces.Box.create(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key, time, action):
        reward = jnp.where(time >= self.after, jnp.nan, 1.0)
        return time + 1, jnp.zeros(1), reward, False, time + 1 >= 2 * self.after


CLOCK, DRIFT = autoreset(Clock()), autoreset(Drift())

# The smallest of each: sizes that compile fast, with every part in use.
SMALL = {
    "ppo": (PPO, {"num_envs": 4, "num_steps": 8, "num_mini_batch": 2, "num_epochs": 2}),
    "a2c": (A2C, {"num_envs": 4, "num_steps": 4}),
    "daac": (DAAC, {"num_envs": 4, "num_steps": 8, "num_mini_batch": 2, "value_epochs": 3}),
    "impala": (IMPALA, {"num_envs": 4, "num_steps": 4, "num_storages": 8, "batch_size": 2}),
}


def small(name, env=CLOCK, **options):
    """An agent of a few environments and eight hidden units."""
    cls, sizes = SMALL[name]
    options = {"hidden_sizes": (8,), **sizes, **options}
    if "policy" in options:
        del options["hidden_sizes"]
    return cls.create(env, **options)


def leaves_equal(a, b):
    """Whether two trees agree in every bit, keys included."""

    def raw(x):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return np.asarray(x)

    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b))
    different = [
        jax.tree_util.keystr(path)
        for (path, x), y in pairs
        if raw(x).tobytes() != raw(y).tobytes() or raw(x).dtype != raw(y).dtype
    ]
    assert not different, f"differ: {different}"
    return True


@jax.jit
def init(agent, key):
    """`agent.init`, compiled once for each kind of agent."""
    return agent.init(key)


@jax.jit
def run_actors(agent, state):
    """(state, rollouts [A, ...]) after every actor ran."""
    actors, rollouts = jax.vmap(agent.run, in_axes=(None, 0))(state.learner, state.actors)
    return state.replace(actors=actors), rollouts


@jax.jit
def update(agent, state, rollouts):
    """`agent.update`, compiled once for each kind of agent."""
    return agent.update(state, rollouts)


@jax.jit
def train_step(agent, state):
    """`agent.train_step`, compiled once for each kind of agent."""
    return agent.train_step(state)
