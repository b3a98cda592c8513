"""An environment of one's own: two pure functions, made to reset themselves by `autoreset`.

A frozen dataclass with two spaces, `reset` and `step` is enough; its fields compare by value, so
two made alike share one compilation. Run it: `python examples/own_environment.py`.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

import jaxroll
from jaxroll import spaces
from jaxroll.envs import autoreset


@dataclasses.dataclass(frozen=True)
class Chase:
    """Walk on a line to where a light is; it terminates there, and is truncated when time is up."""

    length: int = 10
    time_limit: int = 40

    @property
    def observation_space(self):
        """(where I am, where the light is), from 0 to 1."""
        return spaces.Box.create(0, 1, (2,))

    @property
    def action_space(self):
        """Left, stay, right."""
        return spaces.Discrete(3)

    def reset(self, key):
        """Both at random: (state, obs)."""
        places = jax.random.randint(key, (2,), 0, self.length)
        state = {"places": places, "time": jnp.int32(0)}
        return state, self.observe(state)

    def observe(self, state):
        """Places as fractions of the line."""
        return state["places"] / (self.length - 1)

    def step(self, key, state, action):
        """(state, obs, reward, terminated, truncated)."""
        me, light = state["places"]
        me = jnp.clip(me + action - 1, 0, self.length - 1)
        state = {"places": jnp.stack([me, light]), "time": state["time"] + 1}
        arrived = me == light
        reward = jnp.where(arrived, 1.0, -0.02)
        return state, self.observe(state), reward, arrived, state["time"] >= self.time_limit


def main():
    """Train PPO on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    ppo = jaxroll.PPO.create(autoreset(Chase()))
    state, _ = ppo.train(args.steps)
    result = ppo.eval(state, 100)
    print(f"return {result['episode_return']:.2f} in {result['episode_length']:.1f} steps")


if __name__ == "__main__":
    main()
