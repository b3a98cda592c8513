"""Several processes on one machine: as one process, saved and resumed anywhere, a peer killed."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxroll import parallel
from jaxroll.train import History
from tests.agents.agent_toys import leaves_equal
from tests.parallel.spread_agents import AGENTS

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
WORKER = ROOT / "tests" / "parallel" / "process_worker.py"
PATIENCE = 300  # seconds for a whole run on a busy machine
CLOCKS = ("fps", "total_time")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """What one process compiled, the next one like it need not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
        yield


def start(**options):
    """One process of a run."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, str(WORKER), json.dumps(options)],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_all(num_processes, die=None, only=None, **options):
    """The processes of a run, loopback only.

    `die` is (which process, after which iteration), `only` (which process, its own options).
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        start(
            **options,
            coordinator=f"127.0.0.1:{port}",
            num_processes=num_processes,
            process_id=i,
            die_at=die[1] if die and die[0] == i else None,
            **(only[1] if only and only[0] == i else {}),
        )
        for i in range(num_processes)
    ]


def finish(processes):
    """Wait for all; each must end well."""
    try:
        for process in processes:
            output = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, output
    finally:
        end(processes)


def end(processes):
    """Leave no process and no open pipe."""
    for process in processes:
        process.kill()
        process.communicate()


def same_run(one, other, agent="ppo"):
    """Whether two runs ended in the same state, bit by bit, and wrote the same rows."""
    make = AGENTS[agent]
    assert leaves_equal(make().load(one), make().load(other))
    rows = [
        [{k: v for k, v in row.items() if k not in CLOCKS} for row in History.read(d).to_records()]
        for d in (one / "metrics.jsonl", other / "metrics.jsonl")
    ]
    assert rows[0]
    np.testing.assert_equal(rows[0], rows[1])
    return True


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """One process with four devices, twelve iterations."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    finish([start(devices=4, dir=str(path))])
    return path


def test_two_processes_are_one_bit_by_bit(undisturbed, tmp_path):
    finish(start_all(2, devices=2, dir=str(tmp_path / "two")))
    assert same_run(tmp_path / "two", undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("agent", ["convolutional ppo", "daac", "impala"])
def test_two_processes_are_one_for_every_kind_of_agent(agent, tmp_path):
    finish([start(devices=4, dir=str(tmp_path / "one"), agent=agent)])
    finish(start_all(2, devices=2, dir=str(tmp_path / "two"), agent=agent))
    assert same_run(tmp_path / "two", tmp_path / "one", agent)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 8])
def test_a_run_of_two_processes_resumes_on_one(devices, undisturbed, tmp_path):
    run = tmp_path / "moved"
    finish(start_all(2, devices=2, dir=str(run), iterations=6))
    finish([start(devices=devices, dir=str(run), resume=True)])
    assert same_run(run, undisturbed)


@pytest.mark.parametrize(
    ("process", "wish", "reason"),
    [
        (0, {"time_budget": 1e-3}, "time_budget"),
        pytest.param(1, {"time_budget": 1e-3}, "time_budget", marks=pytest.mark.long),
        pytest.param(1, {"stop_at": 3}, "callback", marks=pytest.mark.long),
    ],
)
def test_when_one_process_wants_to_stop_all_stop_at_one_step(process, wish, reason, tmp_path):
    processes = start_all(
        2, devices=1, dir=str(tmp_path / "run"), iterations=10**6, only=(process, wish)
    )
    try:
        said = [one.communicate(timeout=PATIENCE) for one in processes]
    finally:
        end(processes)
    assert [one.returncode for one in processes] == [0, 0], said
    assert all(f"ended by {reason}" in out for out, _ in said)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_when_a_process_is_killed_the_other_leaves_and_all_can_start_again(
    victim, undisturbed, tmp_path
):
    run = tmp_path / "killed"
    processes = start_all(2, devices=2, dir=str(run), die=(victim, 7))
    try:
        dead, survivor = processes[victim], processes[1 - victim]
        assert dead.wait(timeout=PATIENCE) == -signal.SIGKILL
        killed = time.monotonic()
        _, errors = survivor.communicate(timeout=15)
        print(f"the survivor left after {time.monotonic() - killed:.1f} s")
    finally:
        end(processes)
    assert survivor.returncode == parallel.PEER_LOST, errors
    assert "another process of this run is gone" in errors
    assert "resume" in errors
    finish(start_all(2, devices=2, dir=str(run), resume=True))
    assert same_run(run, undisturbed)


@pytest.mark.long
def test_a_process_that_is_not_ours_to_end_gets_an_error(tmp_path):
    processes = start_all(2, devices=1, dir=str(tmp_path / "run"), die=(1, 3), own_process=False)
    try:
        assert processes[1].wait(timeout=PATIENCE) == -signal.SIGKILL
        _, errors = processes[0].communicate(timeout=60)
    finally:
        end(processes)
    assert processes[0].returncode != 0
    assert "PeerLostError" in errors


def test_processes_that_slurm_started_find_each_other(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = "train ppo CartPole-v1 --num-envs 4 --num-actors 2 --num-train-steps 128"
    words += " --set num_steps=8 --set log_interval=32 --set num_test_episodes=2 --distributed"
    words += f" --out {tmp_path}/run"

    def start(i):
        # As srun sets them for a job of two tasks on this machine.
        slurm = {"JOB_ID": 1, "STEP_NODELIST": "localhost", "NTASKS": 2, "PROCID": i, "LOCALID": i}
        env = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
        env |= {"JAX_COORDINATOR_PORT": str(port), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, "-m", "jaxroll", *words.split()],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    finish([start(i) for i in range(2)])
    assert History.read(tmp_path / "run").steps.tolist() == [32, 64, 96, 128]
