"""Continuous actions: PPO on Pendulum, with normalised observations and rewards.

Run it: `python examples/continuous_control.py --steps 500000`.
"""

import argparse

import jaxroll


def main():
    """Train on Pendulum; about −1200 at first, above −250 when it has learned to stand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500_000)
    args = parser.parse_args()
    ppo = jaxroll.PPO.create(
        "Pendulum-v1",
        num_envs=16,
        num_steps=128,
        num_epochs=10,
        num_mini_batch=16,
        learning_rate=1e-3,
        decay_steps=args.steps,
        discount=0.9,
        entropy_coef=0.0,
        normalize_observations=True,
        normalize_rewards=True,
    )
    state, _ = ppo.train(args.steps)
    print("return over 100 episodes:", ppo.eval(state, 100)["episode_return"])


if __name__ == "__main__":
    main()
