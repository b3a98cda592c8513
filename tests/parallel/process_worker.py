"""One process of a run, started by the tests with its options as JSON."""

import json
import os
import signal
import sys

import jax

options = {
    "devices": 1,
    "coordinator": None,
    "num_processes": None,
    "process_id": None,
    "agent": "ppo",  # of spread_agents
    "iterations": 12,
    "dir": None,
    "reduction": "exact",
    "resume": False,
    "die_at": None,  # iterations after which this process kills itself
    "own_process": True,
    "stop_at": None,  # iterations after which a callback of this process asks for the end
    "time_budget": None,
    **json.loads(sys.argv[1]),
}
jax.config.update("jax_num_cpu_devices", options["devices"])

import jaxroll  # noqa: E402
from tests.parallel.spread_agents import make  # noqa: E402


def main():
    if options["coordinator"] is not None:
        jaxroll.parallel.initialize(
            options["coordinator"], options["num_processes"], options["process_id"]
        )
    agent = make(options["agent"])
    steps = agent.steps_per_iteration

    def die(event):
        if options["die_at"] is not None and event.state.learner.iteration >= options["die_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    def stop(event):
        return (
            options["stop_at"] is not None and event.state.learner.iteration >= options["stop_at"]
        )

    _, history = agent.train(
        agent.prefilled_steps + options["iterations"] * steps,
        mesh=jaxroll.parallel.make_mesh(),
        reduction=options["reduction"],
        checkpoint_dir=options["dir"],
        checkpoint_interval=4 * steps,
        log_interval=steps if options["dir"] else 10**9,
        resume=options["resume"],
        callbacks=[die, stop],
        time_budget=options["time_budget"],
        progress="silent",
        own_process=options["own_process"],
    )
    print(f"ended by {history.stopped_by}", flush=True)


main()
