"""A policy of one's own, in plain JAX: mirrored states get mirrored actions by construction.

A frozen dataclass with `init` and `apply` is enough; any network library fits behind them.
Run it: `python examples/own_policy.py --steps 100000`.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

import jaxroll
from jaxroll.distributions import Categorical


@dataclasses.dataclass(frozen=True)
class MirrorPolicy(jaxroll.Policy):
    """For CartPole, whose left and right are alike: odd logits, an even value."""

    width: int = 64

    def init(self, key, obs):
        """Params from an example [B, 4] of the observations."""
        first, second = jax.random.split(key)
        return {
            "hidden": jax.random.normal(first, (obs.shape[-1], self.width)),
            "policy": jnp.zeros(self.width),
            "value": 0.1 * jax.random.normal(second, (self.width,)),
        }

    def apply(self, params, carry, obs, is_first):
        """(carry, output) of observations [B, 4]; there is no carry here."""
        hidden = jnp.tanh(obs @ params["hidden"])  # odd in obs
        push = hidden @ params["policy"]
        value = hidden**2 @ params["value"]
        distribution = Categorical(jnp.stack([-push, push], axis=-1))
        return carry, jaxroll.PolicyOutput(distribution, value)


def main():
    """Train PPO with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    ppo = jaxroll.PPO.create("CartPole-v1", policy=MirrorPolicy())
    state, _ = ppo.train(args.steps)
    print("return over 32 episodes:", ppo.eval(state, 32)["episode_return"])


if __name__ == "__main__":
    main()
