"""An environment whose episodes are written down: for a JAX, a Gymnasium and a hand-made loop.

Observations are (episode, step): no two rows of a script are alike. Episodes end in every way,
some after a single step, so that ends are adjacent.
"""

import dataclasses

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from jaxroll import spaces

# (length, terminated, truncated)
SCRIPT = (
    (3, True, False),
    (1, False, True),
    (1, True, False),
    (2, True, True),
    (4, False, True),
    (1, True, True),
    (1, False, True),
)
LENGTH = np.array([e[0] for e in SCRIPT])
TERMINATED = np.array([e[1] for e in SCRIPT])
TRUNCATED = np.array([e[2] for e in SCRIPT])
NUM_ACTIONS = 3


def reward_of(episode, step, action):
    return 10.0 * episode + step + 0.25 * action


@dataclasses.dataclass(frozen=True)
class ScriptedJax:
    """Not resetting itself; the key chooses the episode."""

    form: str = "five"
    observation_space = spaces.Box.create(0, 10, (2,))
    action_space = spaces.Discrete(NUM_ACTIONS)

    def reset(self, key):
        state = jax.random.randint(key, (), 0, len(SCRIPT)), jnp.int32(0)
        return state, self.observe(state)

    def observe(self, state):
        return jnp.stack(state).astype(jnp.float32)

    def step(self, key, state, action):
        episode, step = state
        reward = reward_of(episode, step, action)
        state = episode, step + 1
        over = state[1] >= jnp.asarray(LENGTH)[episode]
        terminated = over & jnp.asarray(TERMINATED)[episode]
        truncated = over & jnp.asarray(TRUNCATED)[episode]
        return state, self.observe(state), reward, terminated, truncated


class ScriptedGym(gymnasium.Env):
    """One environment; the seed chooses the first episode, the others follow in order."""

    observation_space = gymnasium.spaces.Box(0, 10, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)

    def __init__(self, fail_at=None):
        self.episode, self.step_count, self.closed = -1, 0, False
        self.total, self.fail_at = 0, fail_at

    def observe(self):
        return np.array([self.episode, self.step_count], np.float64)

    def reset(self, *, seed=None, options=None):
        self.episode = (self.episode + 1 if seed is None else seed) % len(SCRIPT)
        self.step_count = 0
        return self.observe(), {}

    def step(self, action):
        if self.total == self.fail_at:
            raise ZeroDivisionError("the scripted failure")
        self.total += 1
        reward = reward_of(self.episode, self.step_count, int(action))
        self.step_count += 1
        over = self.step_count >= LENGTH[self.episode]
        flags = bool(over and TERMINATED[self.episode]), bool(over and TRUNCATED[self.episode])
        return self.observe(), reward, *flags, {}

    def close(self):
        self.closed = True


class ScriptedVector(VectorEnv):
    """A user's own vector environment, with its own buffer and integer rewards times four.

    Like ALE's, it hands over dense final observations that are garbage where nothing ended.
    """

    def __init__(self, num_envs, mode):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode(mode)}
        self.mode = mode
        self.envs = [ScriptedGym() for _ in range(num_envs)]
        self.single_observation_space = ScriptedGym.observation_space
        self.single_action_space = ScriptedGym.action_space
        self.buffer = np.zeros((num_envs, 2))
        self.ended = np.zeros(num_envs, bool)
        self.closed_count = 0

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.buffer[~mask] = -99  # only what was asked for may be read
        for i in np.flatnonzero(mask):
            self.buffer[i] = self.envs[i].reset(seed=None if seed is None else seed + int(i))[0]
        self.ended[mask] = False
        return self.buffer, {}

    def step(self, actions):
        assert actions.dtype == np.int64
        n = self.num_envs
        reward, final = np.zeros(n), np.full((n, 2), 77.0)
        terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
        for i, env in enumerate(self.envs):
            if self.mode == "NextStep" and self.ended[i]:
                self.buffer[i] = env.reset()[0]
                continue
            assert not self.ended[i], "stepped past the end"
            self.buffer[i], reward[i], terminated[i], truncated[i], _ = env.step(actions[i])
            if self.mode == "SameStep" and (terminated[i] or truncated[i]):
                final[i] = self.buffer[i]
                self.buffer[i] = env.reset()[0]
        if self.mode != "SameStep":
            self.ended = terminated | truncated
        actions[:] = -1  # what was handed over is the environment's to spoil
        info = {"final_obs": final} if self.mode == "SameStep" else {}
        return self.buffer, reward, terminated, truncated, info

    def close(self, **kwargs):
        self.closed_count += 1


def hand_stepped(first_episode, actions, next_step):
    """Rows of one environment, stepped by hand; one dict of arrays over T."""
    env = ScriptedGym()
    obs, _ = env.reset(seed=first_episode)
    is_first, ended, rows = True, False, []
    for action in actions:
        row = {"obs": obs, "is_first": is_first, "valid": not ended}
        if ended:
            row |= {"reward": 0.0, "terminated": False, "truncated": False, "final_obs": obs}
            (obs, _), is_first, ended = env.reset(), True, False
        else:
            final, reward, terminated, truncated, _ = env.step(action)
            row |= {"reward": reward, "terminated": terminated, "truncated": truncated}
            row["final_obs"] = obs = final
            is_first = False
            if terminated or truncated:
                ended = next_step
                if not next_step:
                    (obs, _), is_first = env.reset(), True
        rows.append(row)
    result = {k: np.array([row[k] for row in rows]) for k in rows[0]}
    return result | {"last_obs": obs, "last_is_first": is_first}
