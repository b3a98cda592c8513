"""Meshes: what they hold, what does not fit them, and that they never wait forever."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxroll import parallel
from tests.agents.agent_toys import DRIFT, small
from tests.parallel.spread_agents import TINY

ROOT = pathlib.Path(__file__).parents[2]


def test_a_mesh_has_the_devices_asked_for():
    assert parallel.make_mesh().size == jax.device_count() == 8
    assert parallel.make_mesh(2).axis_names == (parallel.ACTORS,)
    chosen = parallel.make_mesh(devices=jax.devices()[4:6])
    assert list(chosen.devices) == jax.devices()[4:6]


@pytest.mark.parametrize("count", [0, 9, -1])
def test_a_mesh_of_devices_that_are_not_there_is_an_error(count):
    with pytest.raises(ValueError, match=f"between 1 and the 8 cpu devices there are, got {count}"):
        parallel.make_mesh(count)


def test_the_devices_must_divide_the_actors():
    with pytest.raises(ValueError, match=r"divide num_actors = 6, got 4.*make_mesh\(3\).*\[1, 2"):
        parallel.check_mesh(parallel.make_mesh(4), 6)
    agent = small("ppo", DRIFT, num_actors=2)
    with pytest.raises(ValueError, match="divide num_actors = 2, got 8"):
        agent.train(100, mesh=parallel.make_mesh(8), progress="silent")


def test_num_learners_is_the_size_of_the_mesh_or_an_error():
    agent = small("ppo", DRIFT, num_actors=2)
    parallel.check_mesh(parallel.make_mesh(2), 2, num_learners=2)
    with pytest.raises(ValueError, match="num_learners is the mesh's size, 2; got 1"):
        agent.train(100, mesh=parallel.make_mesh(2), num_learners=1, progress="silent")
    with pytest.raises(ValueError, match=r"without a mesh; got 2.*make_mesh\(2\)"):
        agent.train(100, num_learners=2, progress="silent")


def test_a_mesh_with_other_axes_is_an_error():
    other = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    with pytest.raises(ValueError, match="single axis"):
        parallel.check_mesh(other, 2)


def test_a_tree_is_placed_by_a_prefix_of_specs_and_keys_too():
    mesh = parallel.make_mesh(4)
    keys = jax.random.split(jax.random.key(0), 4)
    tree = {"all": jnp.arange(3.0), "spread": (jnp.arange(8), keys)}
    specs = {"all": PartitionSpec(), "spread": PartitionSpec(parallel.ACTORS)}
    placed = parallel.place(tree, mesh, specs)
    assert placed["all"].sharding.is_fully_replicated
    assert placed["spread"][0].addressable_shards[1].data.tolist() == [2, 3]
    assert placed["spread"][1].shape == (4,)
    assert len(placed["spread"][1].sharding.device_set) == 4
    assert parallel.local(placed)["all"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"coordinator": "127.0.0.1:1"}, "together"),
        ({"num_processes": 2, "process_id": 0}, "together"),
        (
            {"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": 2},
            "from 0 to num_processes - 1 = 1, got 2",
        ),
    ],
)
def test_processes_that_cannot_be_joined_are_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        parallel.initialize(**given)


def test_processes_that_jax_finds_have_a_heartbeat_fit_for_pods(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    parallel.initialize()
    parallel.initialize("127.0.0.1:1", 2, 0)
    parallel.initialize(heartbeat_timeout=30)
    assert [c["heartbeat_timeout_seconds"] for c in calls] == [100, 10, 30]
    assert calls[0]["coordinator_address"] is None
    with pytest.raises(ValueError, match="heartbeat_timeout must be at least 1"):
        parallel.initialize(heartbeat_timeout=0)


def test_without_a_cluster_the_error_says_what_to_give(monkeypatch):
    def nothing_found(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nothing_found)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(ValueError, match=r"no Slurm, MPI or TPU pod.*give coordinator"):
        parallel.initialize()


def test_alone_a_process_knows_its_own_flag():
    assert parallel.process_max(3) == 3
    assert parallel.process_max(0) == 0


def test_alone_an_error_is_what_it_was():
    with pytest.raises(ZeroDivisionError), parallel.peer_guard(own_process=True):
        _ = 1 / 0
    with pytest.raises(jax.errors.JaxRuntimeError), parallel.peer_guard(own_process=True):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: closed")


def test_a_lost_peer_is_told_from_a_fault_of_our_own():
    gone = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-gather failed: Connection closed by peer")
    wrapped = RuntimeError("could not save")
    wrapped.__cause__ = gone
    assert parallel.is_peer_lost(gone)
    assert parallel.is_peer_lost(wrapped)
    assert not parallel.is_peer_lost(ValueError("no"))
    assert parallel.is_peer_lost(ValueError("UNKNOWN: Gloo AllGather failed: reset by peer"))


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("UNAVAILABLE: failed to connect to all addresses", True),
        ("DEADLINE_EXCEEDED: barrier timed out", True),
        ("INTERNAL: Gloo all-reduce failed: Connection reset by peer", True),
        ("INTERNAL: Gloo all-reduce failed: Timed out waiting 30000ms for recv", True),
        ("FAILED_PRECONDITION: Error dispatching computation: Broken pipe", True),
        ("INTERNAL: NCCL operation failed: remote process exited", True),
        ("ABORTED: /job:jax_worker/task:1 stopped sending heartbeats", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes", False),
        ("INVALID_ARGUMENT: buffer was donated", False),
        ("INTERNAL: Failed to allocate 8 bytes for new constant", False),
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS", False),
        ("INTERNAL: failed to enable peer access between devices", False),
        ("UNKNOWN: the compiler gave up", False),
        (
            "INTERNAL: CpuCallback error: Traceback (most recent call last):\n"
            "ConnectionResetError: Connection reset by peer",
            False,
        ),
    ],
)
def test_only_a_broken_connection_is_a_lost_peer(text, lost):
    assert parallel.is_peer_lost(jax.errors.JaxRuntimeError(text)) == lost


def test_a_users_own_error_is_no_lost_peer():
    assert not parallel.is_peer_lost(ValueError("the server said: connection reset by peer"))
    assert not parallel.is_peer_lost(ConnectionResetError("UNAVAILABLE: connection reset by peer"))


def many_updates(devices):
    """300 updates with no pause, in a process that a deadlock would abort."""
    options = {"devices": devices, "agent": TINY, "iterations": 300, "reduction": "fast"}
    subprocess.run(
        [sys.executable, "tests/parallel/process_worker.py", json.dumps(options)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        check=True,
        timeout=300,
    )
    return True


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_three_hundred_updates_with_no_pause_finish(devices):
    assert many_updates(devices)


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 8])
def test_three_hundred_updates_finish_ten_times(devices):
    assert all(many_updates(devices) for _ in range(10))
