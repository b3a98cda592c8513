"""A sweep: learning rates × seeds, all in one compiled program.

Run it: `python examples/sweep.py --steps 60000 --out rates.png`.
"""

import argparse

import jaxroll
from jaxroll.train import plot_runs


def main():
    """Train 3 × 3 members of PPO and print what each learned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--out", help="a .png, .svg or .pdf file for the learning curves")
    args = parser.parse_args()
    rates = [1e-4, 1e-3, 1e-2]
    ppo = jaxroll.PPO.create("CartPole-v1")
    result = jaxroll.sweep(ppo, args.steps, seeds=3, hyperparameters={"learning_rate": rates})
    for row in result.eval(num_episodes=32):
        rate, seed = row["learning_rate"], row["seed"]
        print(f"learning rate {rate:g}, seed {seed}: return {row['episode_return']:.1f}")
    if args.out:
        curves = {f"{rate:g}": result.history.select(learning_rate=rate) for rate in rates}
        plot_runs(curves, "episode_return", out=args.out)


if __name__ == "__main__":
    main()
