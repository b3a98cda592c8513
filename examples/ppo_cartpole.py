"""PPO: train, evaluate, draw the learning curve.

Run it: `python examples/ppo_cartpole.py --steps 200000 --out cartpole.png`.
"""

import argparse

import jaxroll


def main():
    """Train on CartPole until it is solved or the steps are used up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a .png, .svg or .pdf file for the learning curve")
    args = parser.parse_args()
    ppo = jaxroll.PPO.create("CartPole-v1")
    state, history = ppo.train(
        args.steps, seed=args.seed, eval_interval=20_000, target_return=500.0
    )
    result = ppo.eval(state, num_episodes=100)
    print(f"stopped by {history.stopped_by}, return over 100 episodes:", result["episode_return"])
    if args.out:
        history.plot("episode_return", "eval_episode_return", out=args.out)


if __name__ == "__main__":
    main()
