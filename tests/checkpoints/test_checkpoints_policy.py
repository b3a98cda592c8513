import errno
import os
import shutil
import subprocess
import threading

import numpy as np
import pytest

from jaxroll.checkpoints import (
    Checkpointer,
    CheckpointWarning,
    SaveError,
    arrays,
    manifest,
    save_pytree,
    steps,
)

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
        ({"keep_latest": None}, [0, 1, 2, 3, 4, 5]),
        ({"keep_latest": 1, "best_key": "return"}, [1, 5]),
        ({"keep_latest": 1, "best_key": "return", "keep_best": 2}, [0, 1, 5]),
        ({"keep_latest": 1, "best_key": "return", "best_mode": "min"}, [3, 5]),
        ({"keep_latest": 2, "best_key": "return", "keep_best": 0}, [4, 5]),
        ({"keep_latest": 2, "best_key": "other"}, [4, 5]),
    ],
)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_latest_and_best_stay(tmp_path, options, kept, asynchronous):
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous, **options)
    save_all(checkpointer, [3.0, 9.0, float("nan"), 1.0, None, 2.0])
    assert checkpointer.steps() == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{n:010d}" for n in kept]
    assert checkpointer.latest_step() == 5


def test_best_step_is_the_later_of_equals(tmp_path):
    checkpointer = Checkpointer(tmp_path, best_key="return", keep_latest=None)
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
    for options in ({"keep_latest": 0}, {"keep_best": -1}, {"best_mode": "best"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Checkpointer(tmp_path, **options)


def test_nothing_is_deleted_before_the_successor_stands(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep_latest=1, asynchronous=False)
    seen = []
    original = steps.remove

    def watched(path):
        if path.exists() and steps.DELETING in path.name:
            seen.append(checkpointer.steps())
        original(path)

    monkeypatch.setattr("jaxroll.checkpoints.checkpointer.remove", watched)
    checkpointer.save(1, STATE)
    checkpointer.save(2, STATE)
    assert seen == [[2]]


def test_leftovers_of_a_killed_save_go_with_the_next(tmp_path):
    for name in ("0000000003.saving", "0000000001.deleting"):
        (tmp_path / name / "arrays").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0000000004", "notes.txt"]


def test_caller_is_not_held_up_by_the_disk(tmp_path, monkeypatch):
    gate = threading.Event()
    original = arrays.write_arrays

    def slow(*args):
        assert gate.wait(60)
        original(*args)

    monkeypatch.setattr(arrays, "write_arrays", slow)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, STATE)  # returns although nothing can be written yet
    assert checkpointer.steps() == []
    gate.set()
    assert checkpointer.wait()
    assert checkpointer.steps() == [1]


def failing(monkeypatch, times):
    calls = []
    original = arrays.write_arrays

    def write(*args):
        calls.append(args)
        if len(calls) <= times:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*args)

    monkeypatch.setattr(arrays, "write_arrays", write)
    return calls


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failed_save_is_tried_again(tmp_path, monkeypatch, asynchronous):
    calls = failing(monkeypatch, 2)
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous, retry_seconds=0)
    checkpointer.save(1, STATE)
    assert checkpointer.wait()
    assert len(calls) == 3
    assert checkpointer.steps() == [1]
    assert checkpointer.errors == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_save_that_keeps_failing_warns_and_the_program_goes_on(tmp_path, monkeypatch, asynchronous):
    calls = failing(monkeypatch, 3)
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous, retry_seconds=0)
    with pytest.warns(CheckpointWarning, match="could not save .*No space left"):
        save_and_wait(checkpointer, 1, STATE)
    assert len(calls) == 3
    assert list(tmp_path.iterdir()) == []
    (error,) = checkpointer.errors
    assert isinstance(error, SaveError)
    assert error.step == 1
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

    monkeypatch.setattr(manifest, "write", refuse)
    checkpointer = Checkpointer(tmp_path, retries=0, strict=True)
    checkpointer.save(1, STATE)
    with pytest.raises(SaveError, match="Permission denied") as error:
        checkpointer.wait()
    assert isinstance(error.value.__cause__, PermissionError)
    assert checkpointer.steps() == []


def test_strict_raises_at_the_next_call(tmp_path, monkeypatch):
    failing(monkeypatch, 1)
    checkpointer = Checkpointer(tmp_path, retries=0, strict=True)
    checkpointer.save(1, STATE)
    with pytest.raises(SaveError):
        checkpointer.save(2, STATE)
    failing(monkeypatch, 1)
    with pytest.raises(SaveError):
        Checkpointer(tmp_path, retries=0, strict=True, asynchronous=False).save(3, STATE)


def test_directory_below_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file" / "run", retries=0)
    with pytest.warns(CheckpointWarning, match="Not a directory"):
        save_and_wait(checkpointer, 1, STATE)
    with pytest.raises(SaveError, match="Not a directory") as error:
        save_pytree(tmp_path / "file" / "model", STATE)
    assert isinstance(error.value.__cause__, NotADirectoryError)


def test_old_step_that_cannot_be_deleted_is_warned_of(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep_latest=1)
    checkpointer.save(1, STATE)
    checkpointer.wait()

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("jaxroll.checkpoints.checkpointer.remove", refuse)
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


# A write that fails leaves futures behind whose errors tensorstore reports when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_full_disk_is_named_and_the_step_before_stays(small_disk):
    checkpointer = Checkpointer(small_disk, retries=1, retry_seconds=0)
    checkpointer.save(1, STATE)
    assert checkpointer.wait()
    noise = np.random.default_rng(0).integers(0, 255, 4 << 20).astype(np.uint8)
    with pytest.warns(CheckpointWarning, match="could not save"):
        save_and_wait(checkpointer, 2, {**STATE, "noise": noise})
    assert sorted(p.name for p in small_disk.iterdir()) == ["0000000001"]
    assert checkpointer.restore(STATE).step == 1
    (small_disk / "fill").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096))
    with pytest.warns(CheckpointWarning, match="is full"):
        save_and_wait(checkpointer, 3, STATE)
    (small_disk / "fill").unlink()
    checkpointer.save(4, STATE)
    assert checkpointer.wait()
    assert checkpointer.restore(STATE).step == 4
