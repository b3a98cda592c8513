"""A run from a config, as the command line makes it: environments, agent, checkpoints, logs.

Run it: `python examples/trainer.py --steps 50000 --out runs/first`.
"""

import argparse

import jaxroll


def main():
    """Train, test, and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--out", help="the run's directory; none: nothing is written")
    args = parser.parse_args()
    trainer = jaxroll.DistributedTrainer(
        {
            "agent": "ppo",
            "env": "CartPole-v1",
            "num_train_steps": args.steps,
            "out": args.out,
            "hyperparameters": {"learning_rate": 1e-3, "num_envs": 32},
        }
    )
    trainer.train()
    print("return over 32 episodes:", trainer.test(32)["episode_return"])
    if trainer.out:
        print("written:", ", ".join(sorted(path.name for path in trainer.out.iterdir())))


if __name__ == "__main__":
    main()
