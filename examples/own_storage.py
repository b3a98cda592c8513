"""A storage of one's own inside PPO: rewards clipped to signs before targets are computed.

`create_factory` decides everything but the sample; the agent hands that over, and keeps discount
and λ in step with its own. Run it: `python examples/own_storage.py --steps 100000`.
"""

import argparse

import jax.numpy as jnp

import jaxroll


class SignedRewards(jaxroll.RolloutStorage):
    """A rollout storage that learns from the sign of each reward, times a scale."""

    parameters = (*jaxroll.RolloutStorage.parameters, "scale")

    scale: float = 1.0

    @classmethod
    def create(cls, example, num_steps, *, scale=1.0, **options):
        """As `RolloutStorage.create`, and the scale, which is a leaf."""
        return super().create(example, num_steps, **options).replace(scale=jnp.float32(scale))

    def before_gradients(self, last_values):
        """Sign the rewards, then the targets as usual."""
        signed = self.scale * jnp.sign(self.data.reward)
        return super(
            SignedRewards, self.replace(data=self.data.replace(reward=signed))
        ).before_gradients(last_values)


def main():
    """Train PPO on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    num_steps = 64
    ppo = jaxroll.PPO.create(
        "CartPole-v1",
        num_steps=num_steps,
        storage=SignedRewards.create_factory(num_steps=num_steps, scale=0.1),
    )
    state, _ = ppo.train(args.steps)
    print("return over 32 episodes:", ppo.eval(state, 32)["episode_return"])


if __name__ == "__main__":
    main()
