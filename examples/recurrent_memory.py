"""Memory: a task that a feed-forward policy cannot do better than by chance, and an LSTM solves.

MemoryChain shows a bit, then nothing for a while, then asks for it.
Run it: `python examples/recurrent_memory.py --network lstm` (or mlp, gru).
"""

import argparse

import jaxroll


def main():
    """Train on MemoryChain; chance is 0, the best is 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--network", default="lstm", choices=("mlp", "lstm", "gru"))
    args = parser.parse_args()
    env = jaxroll.make_env("MemoryChain-bsuite", memory_length=10)
    # An episode has 11 steps: a rollout of 22 holds two.
    ppo = jaxroll.PPO.create(env, network=args.network, num_envs=64, num_steps=22)
    state, _ = ppo.train(args.steps)
    print("return over 100 episodes:", ppo.eval(state, 100)["episode_return"])


if __name__ == "__main__":
    main()
