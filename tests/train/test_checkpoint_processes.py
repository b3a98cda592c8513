import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxroll.train.checkpoint import Checkpointer

ENV = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}

SAVE_AT_EXIT = """
import sys
import numpy as np
from jaxroll.train.checkpoint import Checkpointer
Checkpointer(sys.argv[1]).save(1, {"w": np.arange(5)})
"""


def test_program_that_ends_waits_for_its_save(tmp_path):
    subprocess.run([sys.executable, "-c", SAVE_AT_EXIT, str(tmp_path)], env=ENV, check=True)
    assert Checkpointer(tmp_path).restore({"w": np.zeros(5, int)}).state["w"].tolist() == [
        *range(5)
    ]


SAVE_FOR_EVER = """
import sys, warnings
import numpy as np
from jaxroll.train.checkpoint import Checkpointer, CheckpointWarning
warnings.simplefilter("error", CheckpointWarning)
checkpointer = Checkpointer(sys.argv[1], keep_latest=2)
for step in range(int(sys.argv[2]), 10**6):
    rng = np.random.default_rng(step)
    checkpointer.save(step, {"w": rng.normal(size=(64, 64)), "n": np.int64(step)})
    if step % 3 == 0:  # every third is saved twice, so that replacing is interrupted as well
        checkpointer.save(step, {"w": rng.normal(size=(64, 64)), "n": np.int64(-step)})
    print(step, flush=True)
"""


def check_kills(directory, kills, seed):
    rng = np.random.default_rng(seed)
    like = {"w": np.zeros((64, 64)), "n": np.int64(0)}
    start = 1
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(directory), str(start)],
            stdout=subprocess.PIPE,
            text=True,
            env=ENV,
        )
        assert process.stdout is not None
        for _ in range(4):
            last = int(process.stdout.readline())
        time.sleep(rng.uniform(0, 0.3))  # the moment of the kill is what is random here
        process.kill()
        rest = process.communicate()[0].split("\n")
        last = max([last, *(int(line) for line in rest[:-1])])
        # No step is skipped with a warning (an error here): the newest one is whole.
        step, state, _ = Checkpointer(directory).restore(like)
        assert last - 1 <= step <= last + 1  # only what was under way is missing
        rng_then = np.random.default_rng(step)
        first, second = rng_then.normal(size=(64, 64)), rng_then.normal(size=(64, 64))
        expected = {step: first, -step: second}[int(state["n"])]
        assert state["w"].tobytes() == expected.tobytes()
        start = step + 1


@pytest.mark.slow
def test_newest_step_is_whole_after_kill_9(tmp_path):
    check_kills(tmp_path, 5, seed=0)


@pytest.mark.long
def test_newest_step_is_whole_after_kill_9_many_times(tmp_path):
    check_kills(tmp_path, 50, seed=1)


TWO_PROCESSES = """
import sys, warnings
import jax
rank, address, directory, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, rank)
import jax.numpy as jnp
import numpy as np
from jaxroll.train.checkpoint import Checkpointer
from jaxroll.train.states import load_pytree, save_pytree
from jaxroll.train import step_files

mesh = jax.make_mesh((4,), ("actors",), axis_types=(jax.sharding.AxisType.Auto,))
shared, actors = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("actors"))
specs = {"shared": shared, "actors": actors}

def init():
    return {
        "shared": {"w": jnp.arange(12.0).reshape(3, 4), "count": jnp.int32(0)},
        "actors": {
            "x": jnp.arange(32, dtype=jnp.uint8).reshape(8, 4),
            "key": jax.random.split(jax.random.key(0), 8),
        },
    }

@jax.jit
def update(state):  # an all-reduce in every step, while saves are under way
    total = state["actors"]["x"].sum().astype(jnp.int32)
    w, count = state["shared"]["w"] + 1, state["shared"]["count"] + total
    return {**state, "shared": {"w": w, "count": count}}

state = jax.jit(init, out_shardings=specs)()
host = np.arange(3)
if mode == "fail" and rank == 1:  # one process cannot write, once
    original = step_files.write_shards
    def write_shards(*args):
        step_files.write_shards = original
        original(*args)
        raise OSError("no space left for process 1")
    step_files.write_shards = write_shards
with Checkpointer(directory, keep_latest=2, retry_seconds=0.0) as checkpointer:
    for step in range(5):
        checkpointer.save(step, {**state, "host": host}, config={"step": step})
        state = jax.block_until_ready(update(state))
assert checkpointer.errors == [], checkpointer.errors
assert checkpointer.steps() == [3, 4]
like = {**jax.eval_shape(init), "host": host}
got = checkpointer.restore(like, shardings={**specs, "host": shared})
assert got.step == 4 and not got.state["actors"]["x"].is_fully_addressable
save_pytree(directory + "/model", got.state["shared"])
shared, _ = load_pytree(directory + "/model", got.state["shared"])
assert int(shared["count"]) == int(got.state["shared"]["count"])
print("done", rank, flush=True)
"""


def expected_state(step):
    x = np.arange(32, dtype=np.uint8).reshape(8, 4)
    return {
        "shared": {
            "w": np.arange(12.0, dtype=np.float32).reshape(3, 4) + np.float32(step),
            "count": np.int32(step * x.sum(dtype=np.int32)),
        },
        "actors": {"x": x, "key": jax.random.split(jax.random.key(0), 8)},
        "host": np.arange(3),
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "fail"])
def test_saved_on_two_processes_restored_on_one(tmp_path, mode):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(rank), address, str(tmp_path), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENV,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    expected = expected_state(4)
    for devices in (1, 4):
        kinds = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((devices,), ("a",), axis_types=kinds, devices=jax.devices()[:devices])
        shared, actors = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("a")))
        step, state, metadata = Checkpointer(tmp_path).restore(
            jax.eval_shape(lambda: expected) | {"host": expected["host"]},
            shardings={"shared": shared, "actors": actors, "host": shared},
        )
        assert (step, metadata["config"]) == (4, {"step": 4})
        assert len(state["actors"]["key"].sharding.device_set) == devices
        for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            if jax.numpy.issubdtype(want.dtype, jax.dtypes.prng_key):
                got, want = jax.random.key_data(got), jax.random.key_data(want)
            assert got.dtype == want.dtype
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
