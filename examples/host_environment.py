"""Host environments: PPO on Gymnasium's CartPole, or on any other by its name.

Run it: `python examples/host_environment.py --env gymnasium:Acrobot-v1`.
"""

import argparse

import jaxroll


def main():
    """Train and evaluate; environments are opened and closed by the agent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--env", default="gymnasium:CartPole-v1")
    args = parser.parse_args()
    ppo = jaxroll.PPO.create(args.env)
    state, _ = ppo.train(args.steps)
    print("return over 32 episodes:", ppo.eval(state, 32)["episode_return"])


if __name__ == "__main__":
    main()
