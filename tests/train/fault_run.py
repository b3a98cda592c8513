"""A small training run in a process of its own, to be killed: `fault_run.py RUN AGENT [STEPS]`.

It goes on where the run in its directory is, and leaves with 128 + signal if one stopped it.
`HOLD` in the environment names a moment to stay in for ever, so that a signal surely meets it.
"""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

from jaxroll import A2C, DAAC, IMPALA, PPO, make_env
from jaxroll.train import run, signals, step_files
from jaxroll.train.checkpoint import CheckpointWarning
from jaxroll.train.files import LogWarning

SIZES = {"num_envs": 4, "num_steps": 8, "hidden_sizes": (8,)}
STEPS_PER_ITERATION = 32
# Between them: carries, both normalisers, schedules, two optimisers, a filled ring with cursors.
AGENTS = {
    "ppo": lambda: PPO.create(
        make_env("CartPole-v1"),
        network="gru",
        num_mini_batch=2,
        num_epochs=1,
        normalize_observations=True,
        normalize_rewards=True,
        decay_steps=20_000,
        **SIZES,
    ),
    "a2c": lambda: A2C.create(make_env("CartPole-v1"), decay_steps=20_000, **SIZES),
    "daac": lambda: DAAC.create(
        make_env("CartPole-v1"), num_mini_batch=2, value_freq=2, decay_steps=20_000, **SIZES
    ),
    "impala": lambda: IMPALA.create(
        make_env("CartPole-v1"), num_storages=12, batch_size=4, decay_steps=20_000, **SIZES
    ),
}
# Iterations between checkpoints and between rows: neither divides the other, so that a checkpoint
# also falls inside of a row.
SAVE_EVERY, LOG_EVERY = 2, 3


def hold(name, function):
    """The function; or, if this moment is to be held, a sleep that only a signal ends."""

    def held(*args, **kwargs):
        print(name, flush=True)
        if os.environ.get("HOLD") == name:
            time.sleep(3600)
        return function(*args, **kwargs)

    return held


def main(directory, agent, steps):
    """Train to `steps`, from wherever the run is."""
    for category in (CheckpointWarning, LogWarning):
        warnings.simplefilter("error", category)  # a kill is no damage
    run.Run.make_state = hold("compiling", run.Run.make_state)
    step_files.write_step = hold("saving", step_files.write_step)
    if "BOUND" in os.environ:
        signals.BOUND = float(os.environ["BOUND"])
    _, history = AGENTS[agent]().train(
        steps,
        seed=7,
        checkpoint_dir=directory,
        checkpoint_interval=SAVE_EVERY * STEPS_PER_ITERATION,
        log_interval=LOG_EVERY * STEPS_PER_ITERATION,
        loggers="csv",
        resume=(Path(directory) / ".lock").exists(),
        progress="silent",
        own_process=True,
    )
    stopped = history.stopped_by
    return 0 if stopped == "steps" else 128 + signal.Signals[stopped]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
