"""Callbacks and loggers: functions that see each row, and may end the run.

Run it: `python examples/callbacks.py --steps 200000`.
"""

import argparse

import jaxroll


class Patience:
    """Stop when the return has not risen for so many rows."""

    def __init__(self, rows):
        self.rows, self.best, self.since = rows, float("-inf"), 0

    def __call__(self, event):
        """True ends the run."""
        value = event.row.get("episode_return")
        if value is not None and value > self.best:
            self.best, self.since = value, 0
        else:
            self.since += 1
        return self.since >= self.rows


def print_row(row):
    """A logger is a function of a row."""
    print({name: row[name] for name in ("step", "episode_return", "entropy") if name in row})


def main():
    """Train with both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    args = parser.parse_args()
    ppo = jaxroll.PPO.create("CartPole-v1")
    _, history = ppo.train(
        args.steps, callbacks=[Patience(rows=4)], loggers=[print_row], progress="silent"
    )
    print("stopped by", history.stopped_by)


if __name__ == "__main__":
    main()
