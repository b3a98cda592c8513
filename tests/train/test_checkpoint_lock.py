import os
import shutil
import signal
import subprocess
import sys

import pytest

from jaxroll.train.checkpoint import CheckpointError
from jaxroll.train.lock import LockedError, RunLock

HOLD = """
import sys
from jaxroll.train.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another live process that holds the lock of tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_directory_in_use_names_the_process(tmp_path, holder):
    with pytest.raises(LockedError, match=rf"in use by process {holder.pid} on .* since"):
        RunLock(tmp_path).acquire()


def test_lock_of_a_killed_process_is_taken_over(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert str(holder.pid) in (tmp_path / ".lock").read_text()  # it had no time to tidy up
    with RunLock(tmp_path) as lock:
        assert lock.is_held


def test_lock_is_free_after_the_block_and_can_be_taken_again(tmp_path):
    lock = RunLock(tmp_path / "new" / "run")
    for _ in range(2):
        with lock:
            assert lock.is_held
            with pytest.raises(LockedError, match=f"process {os.getpid()}"):
                RunLock(tmp_path / "new" / "run").acquire()
        assert not lock.is_held


def test_taking_a_held_lock_again_is_harmless(tmp_path):
    with RunLock(tmp_path) as lock:
        assert lock.acquire() is lock
    lock.release()


FORK = """
import os, signal, sys, time, warnings
from jaxroll.train.lock import RunLock
RunLock(sys.argv[1]).acquire()
lock = RunLock(sys.argv[1] + "/kept").acquire()
if os.fork() == 0:
    os.kill(os.getppid(), signal.SIGKILL)
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_forked_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", FORK, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.wait()
    try:
        with RunLock(tmp_path / "kept") as lock:
            assert lock.is_held
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_directory_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write to the run directory") as error:
        RunLock(tmp_path / "file" / "run").acquire()
    assert isinstance(error.value.__cause__, OSError)


def test_lock_whose_directory_was_deleted_is_taken_again_unless_another_has_it(tmp_path):
    with RunLock(tmp_path / "run") as lock:
        assert not lock.renew()
        shutil.rmtree(tmp_path / "run")
        assert lock.renew()
        with pytest.raises(LockedError):
            RunLock(tmp_path / "run").acquire()
        shutil.rmtree(tmp_path / "run")
        with RunLock(tmp_path / "run"), pytest.raises(LockedError, match="is in use by"):
            lock.renew()
