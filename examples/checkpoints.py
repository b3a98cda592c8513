"""Checkpoints: a run that was stopped goes on as if it had not been.

Run it: `python examples/checkpoints.py --steps 50000 --out runs/cartpole`, stop it with Ctrl-C
whenever you like, and run it again.
"""

import argparse
import tempfile

import jaxroll


def main():
    """Train half of the steps, go on from the checkpoint, and export the policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--out", help="the run's directory; none: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = args.out or f"{temporary}/run"
        ppo = jaxroll.PPO.create("CartPole-v1")
        ppo.train(args.steps // 2, checkpoint_dir=run, checkpoint_interval=10_000, resume=True)
        state, history = ppo.train(args.steps, checkpoint_dir=run, resume=True)
        print(f"{len(history)} rows, up to step {history.steps[-1]:,}")
        loaded = ppo.load(run)  # the newest intact checkpoint
        print("return over 32 episodes:", ppo.eval(loaded, 32)["episode_return"])
        path = ppo.export(state, f"{run}/policy.bin")  # runs with JAX alone
        print(f"the policy as a file: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
