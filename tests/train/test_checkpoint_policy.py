import errno
import os
import shutil
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

from jaxroll.train import step_files
from jaxroll.train.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointWarning,
)
from jaxroll.train.states import load_pytree, save_pytree

STATE = {"w": np.arange(8.0), "b": np.zeros(3, np.uint8)}


def save_and_wait(checkpointer, step, state):
    checkpointer.save(step, state)
    return checkpointer.wait()


def save_all(checkpointer, scores):
    for step, score in enumerate(scores):
        metrics = {} if score is None else {"return": score}
        checkpointer.save(step, STATE, metrics=metrics)
    checkpointer.wait()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_latest": 2}, [4, 5]),
        ({"keep_latest": 1}, [5]),
        ({"keep_latest": 1, "best_key": "return"}, [1, 5]),
        ({"keep_latest": 1, "best_key": "return", "keep_best": 2}, [0, 1, 5]),
        ({"keep_latest": 2, "best_key": "return", "keep_best": 0}, [4, 5]),
        ({"keep_latest": 2, "best_key": "other"}, [4, 5]),
    ],
)
def test_latest_and_best_stay(tmp_path, options, kept):
    checkpointer = Checkpointer(tmp_path, **options)
    save_all(checkpointer, [3.0, 9.0, float("nan"), 1.0, None, 2.0])
    assert checkpointer.steps() == kept
    assert sorted(p.name for p in tmp_path.glob("0*")) == [f"{n:010d}" for n in kept]
    assert checkpointer.latest_step() == 5


def test_best_step_is_the_later_of_equals(tmp_path):
    checkpointer = Checkpointer(tmp_path, best_key="return", keep_latest=9)
    assert checkpointer.best_step() is None
    assert checkpointer.latest_step() is None
    save_all(checkpointer, [1.0, 5.0, 5.0, 2.0])
    assert checkpointer.best_step() == 2


def test_step_just_saved_stays_even_below_others(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_latest=1)
    checkpointer.save(50, STATE)
    checkpointer.save(20, STATE)
    checkpointer.wait()
    assert checkpointer.steps() == [20, 50]


def test_wrong_options_are_refused(tmp_path):
    for options in ({"keep_latest": 0}, {"keep_best": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Checkpointer(tmp_path, **options)


def test_nothing_is_deleted_before_the_successor_stands(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep_latest=1)
    seen = []
    original = shutil.rmtree

    def watched(path, **options):
        if path.name.endswith(step_files.DELETING):
            seen.append(checkpointer.steps())
        original(path, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    checkpointer.save(1, STATE)
    checkpointer.save(2, STATE)
    checkpointer.wait()
    assert seen == [[2]]


def test_leftovers_of_a_killed_save_go_with_the_next(tmp_path):
    for name in ("0000000003.writing", "0000000001.deleting"):
        (tmp_path / name / "arrays").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0000000004", "notes.txt", "run_id"]


def test_caller_is_not_held_up_by_the_disk(tmp_path, monkeypatch):
    gate = threading.Event()
    original = step_files.write_shards

    def slow(*args):
        assert gate.wait(60)
        return original(*args)

    monkeypatch.setattr(step_files, "write_shards", slow)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, STATE)  # returns although nothing can be written yet
    assert checkpointer.steps() == []
    gate.set()
    assert checkpointer.wait()
    assert checkpointer.steps() == [1]


def failing(monkeypatch, times):
    calls = []
    original = step_files.write_shards

    def write(*args):
        calls.append(args)
        if len(calls) <= times:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    monkeypatch.setattr(step_files, "write_shards", write)
    return calls


def test_failed_save_is_tried_again(tmp_path, monkeypatch):
    calls = failing(monkeypatch, 2)
    checkpointer = Checkpointer(tmp_path, retry_seconds=0)
    checkpointer.save(1, STATE)
    assert checkpointer.wait()
    assert len(calls) == 3
    assert checkpointer.steps() == [1]
    assert checkpointer.errors == []


def test_save_that_keeps_failing_warns_and_the_program_goes_on(tmp_path, monkeypatch):
    calls = failing(monkeypatch, 3)
    checkpointer = Checkpointer(tmp_path, retry_seconds=0)
    with pytest.warns(CheckpointWarning, match="could not save .*No space left"):
        save_and_wait(checkpointer, 1, STATE)
    assert len(calls) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["run_id"]
    (error,) = checkpointer.errors
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.ENOSPC
    checkpointer.save(2, STATE)
    assert checkpointer.wait()  # the old failure is not told twice
    assert checkpointer.steps() == [2]


def test_failed_save_leaves_the_steps_before(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, keep_latest=1, retries=0) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.wait()
        failing(monkeypatch, 1)
        with pytest.warns(CheckpointWarning):
            save_and_wait(checkpointer, 2, STATE)
        assert checkpointer.restore(STATE).step == 1


def test_failed_manifest_is_a_failed_save(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(step_files, "replace_file", refuse)
    checkpointer = Checkpointer(tmp_path, retries=0)
    with pytest.warns(CheckpointWarning, match="Permission denied"):
        save_and_wait(checkpointer, 1, STATE)
    assert isinstance(checkpointer.errors[0].__cause__, PermissionError)
    assert checkpointer.steps() == []


def test_failed_save_is_an_error_at_the_next_call_where_warnings_are(tmp_path, monkeypatch):
    failing(monkeypatch, 1)
    checkpointer = Checkpointer(tmp_path, retries=0)
    checkpointer.save(1, STATE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        with pytest.raises(CheckpointWarning, match="could not save"):
            checkpointer.save(2, STATE)


def test_directory_below_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file" / "run", retries=0)
    with pytest.warns(CheckpointWarning, match="Not a directory"):
        save_and_wait(checkpointer, 1, STATE)
    with pytest.raises(CheckpointError, match="Not a directory") as error:
        save_pytree(tmp_path / "file" / "model", STATE)
    assert isinstance(error.value.__cause__, NotADirectoryError)


def test_old_step_that_cannot_be_deleted_is_warned_of(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep_latest=1)
    checkpointer.save(1, STATE)
    checkpointer.wait()

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(CheckpointWarning, match="could not delete old steps"):
        save_and_wait(checkpointer, 2, STATE)
    assert checkpointer.latest_step() == 2


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    # Lazily: a write that failed may still hold a file open.
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_full_disk_is_named_and_the_step_before_stays(small_disk):
    checkpointer = Checkpointer(small_disk, retries=1, retry_seconds=0)
    checkpointer.save(1, STATE)
    assert checkpointer.wait()
    noise = np.random.default_rng(0).integers(0, 255, 4 << 20).astype(np.uint8)
    with pytest.warns(CheckpointWarning, match="could not save"):
        save_and_wait(checkpointer, 2, {**STATE, "noise": noise})
    assert sorted(p.name for p in small_disk.iterdir()) == ["0000000001", "run_id"]
    assert checkpointer.restore(STATE).step == 1
    (small_disk / "fill").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096))
    with pytest.warns(CheckpointWarning, match="No space left on device"):
        save_and_wait(checkpointer, 3, STATE)
    (small_disk / "fill").unlink()
    checkpointer.save(4, STATE)
    assert checkpointer.wait()
    assert checkpointer.restore(STATE).step == 4


def test_directory_deleted_while_in_use_is_said_and_made_anew(tmp_path):
    checkpointer = Checkpointer(tmp_path / "run")
    assert save_and_wait(checkpointer, 1, STATE)
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(CheckpointWarning, match="was deleted while it was in use"):
        save_and_wait(checkpointer, 2, STATE)
    assert Checkpointer(tmp_path / "run").restore(STATE).step == 2


def test_disk_that_is_full_at_the_start_is_named(small_disk):
    (small_disk / "fill").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096))
    with pytest.raises(CheckpointError, match=rf"saved in {small_disk}/run: .*No space left"):
        Checkpointer(small_disk / "run").check_writable()


@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket/run", None, 3, ""])
def test_only_paths_on_this_machine_are_taken(path):
    for make in (Checkpointer, lambda p: save_pytree(p, STATE), lambda p: load_pytree(p, STATE)):
        with pytest.raises((ValueError, TypeError), match="must be a path"):
            make(path)


FAILING = """
import sys, warnings, resource
import numpy as np
from jaxroll.train.checkpoint import Checkpointer
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
noise = np.random.default_rng(0).integers(0, 255, 1 << 16).astype(np.uint8)
checkpointer = Checkpointer(sys.argv[1], retries=1, retry_seconds=0)
for step in range(3):
    checkpointer.save(step, {str(i): noise for i in range(20)})
    assert not checkpointer.wait()
"""


def test_failed_writes_leave_no_tracebacks(tmp_path):
    command = [sys.executable, "-c", FAILING, str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Event loop is closed" not in done.stderr
