"""Two checkouts of jaxroll, each in a process of its own, taking turns.

This file is also the program of those processes: `python versions.py NUM_ENVS UPDATES` trains once
for each line that it reads and answers with the seconds. It uses only what both checkouts have.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve()
# num_envs, updates of one run, and how much longer this checkout may take.
SIZES = ((4, 100, 1.12), (64, 20, 1.03), (2048, 2, 1.03))
WAYS = ("one jit", "agent.train")


def versions(settings):  # -> list[Row]; harness is imported late: a child needs only jaxroll
    """PPO on CartPole: this checkout against `--baseline`."""
    from harness import Ratio, Row, Spread, quotients

    if settings.baseline is None:
        note = "needs --baseline PATH, another checkout of jaxroll: skipped"
        return [Row("versions", "PPO, CartPole", notes=[note])]
    rows = []
    for num_envs, updates, bound in SIZES[:1] if settings.quick else SIZES:
        updates = 1 if settings.quick else updates
        checkouts = {"before": settings.baseline, "after": str(HERE.parents[2])}
        children = {k: start(path, num_envs, updates) for k, path in checkouts.items()}
        try:
            first = {name: ask(child) for name, child in children.items()}
            times = {f"{name}, {way}": [] for name in children for way in WAYS}
            for turn in range(settings.rounds):
                order = list(children)[:: 1 if turn % 2 else -1]
                for name in order:
                    for way, seconds in ask(children[name]).items():
                        times[f"{name}, {way}"].append(seconds)
        finally:
            for child in children.values():
                child.kill()
                child.wait()
        row = Row("versions", f"PPO, CartPole, {num_envs} envs", rounds=settings.rounds)
        row.steps = num_envs * 128 * updates
        row.times = {name: Spread.of(values) for name, values in times.items()}
        row.first_calls = {f"{n}, {way}": s for n, by in first.items() for way, s in by.items()}
        for way in WAYS:
            ratio = Ratio(f"after, {way}", f"before, {way}", at_most=bound)
            row.ratios.append((ratio, quotients(times, ratio)))
        rows.append(row)
    return rows


def start(checkout, num_envs, updates):
    """A process that trains with the jaxroll of a checkout."""
    path = pathlib.Path(checkout).resolve()
    if not (path / "jaxroll" / "__init__.py").exists():
        raise ValueError(f"--baseline must be a checkout of jaxroll, got {checkout}.")
    return subprocess.Popen(
        [sys.executable, str(HERE), str(num_envs), str(updates)],
        env={**os.environ, "PYTHONPATH": str(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(child):
    """Seconds of one run of a child, by way."""
    child.stdin.write("run\n")
    child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"a child process ended with {child.wait()}")
    return json.loads(line)


def serve(num_envs, updates):
    """The child: train once for each line of the input."""
    import jax
    import purejaxrl

    import jaxroll

    agent = jaxroll.PPO.create("CartPole-v1", **{**purejaxrl.CARTPOLE, "num_envs": num_envs})

    @jax.jit
    def train(key):
        step = lambda state, _: agent.train_step(state)  # noqa: E731
        return jax.lax.scan(step, agent.init(key), length=updates)

    steps = num_envs * 128 * updates
    runs = {
        "one jit": lambda: train(jax.random.key(0)),
        "agent.train": lambda: agent.train(steps, seed=0, progress="silent")[0],
    }
    for _ in sys.stdin:
        seconds = {}
        for way in WAYS:
            begin = time.perf_counter()
            jax.block_until_ready(runs[way]())
            seconds[way] = time.perf_counter() - begin
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
