"""A run that is killed, stopped, damaged or out of disk space goes on as if nothing had been."""

import contextlib
import csv
import errno
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from jaxroll.cli import _is_ours
from jaxroll.train import hooks, run as run_module
from jaxroll.train.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointWarning,
    DamagedError,
    NoCheckpointError,
)
from jaxroll.train.files import LogWarning
from jaxroll.train.lock import LockedError, RunLock
from jaxroll.train.logging import read_jsonl
from tests.agents.agent_toys import CLOCK, DRIFT, Poison, leaves_equal, small
from tests.train.fault_run import AGENTS, LOG_EVERY, STEPS_PER_ITERATION

ROOT = Path(__file__).parents[2]
PATIENCE = 300  # seconds that a process on a busy machine may take for what takes it a few
QUIET = {"progress": "silent"}


def rows_of(run):
    """The rows of metrics.jsonl without what a clock says."""
    clocks = ("fps", "total_time")
    rows = read_jsonl(Path(run) / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in clocks} for row in rows]


def same_run(one, other, agent):
    """Whether two directories end in the same state, bit by bit, with the same rows, each once."""
    assert rows_of(one) == rows_of(other)
    steps = [row["step"] for row in rows_of(one)]
    assert steps == sorted(set(steps))
    return leaves_equal(agent.load(one), agent.load(other))


# Processes.


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """start(run, agent, steps, **environment): fault_run.py; what still runs is ended after."""
    cache = tmp_path_factory.mktemp("xla")
    started = []

    def begin(run, agent, steps, **extra):
        variables = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(ROOT),
            **extra,
        }
        words = [sys.executable, str(ROOT / "tests/train/fault_run.py"), run, agent, steps]
        process = subprocess.Popen(
            [str(word) for word in words],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ends(process, code, said=""):
    """Wait for the process; whether it ended with this code, and said so on stderr."""
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    assert said in err
    return True


def wait_for(process, word):
    """Read what the process prints until the word."""
    for line in process.stdout:
        if line.strip() == word:
            return
    pytest.fail(f"ended with {process.wait()} before {word!r}: {process.stderr.read()}")


def wait_for_step(process, run, step):
    """Until a row of this step is written; whether the process is still there."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None:
        assert time.monotonic() < deadline
        with contextlib.suppress(FileNotFoundError):
            if any(row["step"] >= step for row in rows_of(run)):
                return True
        time.sleep(0.02)
    return False


@functools.cache
def agent_named(name):
    return AGENTS[name]()


@pytest.fixture(scope="session")
def undisturbed(start, tmp_path_factory):
    """undisturbed(agent, iterations): the directory of a run that nothing happened to."""

    @functools.cache
    def run(agent, iterations):
        path = tmp_path_factory.mktemp("undisturbed") / "run"
        assert ends(start(path, agent, iterations * STEPS_PER_ITERATION), 0)
        return path

    return run


def kill_and_go_on(start, undisturbed, run, count):
    """Kill a run `count` times at random moments, let it finish, compare."""
    draw = random.Random(count)
    iterations = 100 * count
    agent = agent_named("ppo")
    reached, kills = 0, 0
    while kills < count:
        process = start(run, "ppo", iterations * STEPS_PER_ITERATION)
        if kills % 5 == 4:  # somewhere in imports, compilation, restore
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=draw.uniform(0, 2.5))
        else:
            target = reached + draw.randint(1, 2) * LOG_EVERY * STEPS_PER_ITERATION
            wait_for_step(process, run, target)
            time.sleep(draw.uniform(0, 0.2))
        process.kill()
        assert ends(process, -signal.SIGKILL), "it was done too soon to be killed"
        kills += 1
        steps = Checkpointer(run / "checkpoints").steps()
        if steps:
            # The newest is the one loaded: going back to another would warn, an error here.
            iteration = int(agent.load(run).learner.iteration)
            assert iteration * STEPS_PER_ITERATION == steps[-1]
            reached = steps[-1]
    assert ends(start(run, "ppo", iterations * STEPS_PER_ITERATION), 0)
    whole = undisturbed("ppo", iterations)
    assert same_run(whole, run, agent)
    tables = [(path / "metrics.csv").read_text().splitlines() for path in (whole, run)]
    one, other = ([row["step"] for row in csv.DictReader(table)] for table in tables)
    assert one == other
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == sorted(path.name for path in (whole / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_like_the_undisturbed_one(start, undisturbed, tmp_path):
    kill_and_go_on(start, undisturbed, tmp_path / "run", 5)


@pytest.mark.long
def test_a_run_killed_fifty_times_ends_like_the_undisturbed_one(start, undisturbed, tmp_path):
    kill_and_go_on(start, undisturbed, tmp_path / "run", 50)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n if n == "a2c" else pytest.param(n, marks=pytest.mark.long) for n in AGENTS],
)
def test_half_a_run_and_a_new_process_is_a_run_bit_by_bit(name, start, undisturbed, tmp_path):
    run = tmp_path / "run"
    # 19 is inside of a row: the new process must give that row whole.
    for iterations in (19, 38):
        assert ends(start(run, name, iterations * STEPS_PER_ITERATION), 0)
    whole = undisturbed(name, 38)
    agent = agent_named(name)
    assert same_run(whole, run, agent)
    before = agent.prefilled_steps // STEPS_PER_ITERATION  # a ring is filled before iteration 1
    done = [row["step"] // STEPS_PER_ITERATION - before for row in rows_of(run)]
    assert done == [*range(LOG_EVERY, 38 - before, LOG_EVERY), 38 - before]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_update_a_signal_ends_the_process_at_once(number, start, tmp_path):
    # It would stay for an hour, and the bound is as long: only "nothing to save" can end it.
    process = start(tmp_path / "run", "ppo", 320, HOLD="compiling", BOUND="3600")
    wait_for(process, "compiling")
    process.send_signal(number)
    name = signal.Signals(number).name
    assert ends(process, 128 + number, f"ended by {name} without a save; nothing is on disk")
    assert not Checkpointer(tmp_path / "run" / "checkpoints").steps()


@pytest.mark.slow
def test_a_signal_ends_a_compilation(start, tmp_path):
    # No cache: XLA holds the main thread for seconds, and no Python handler could run there.
    process = start(tmp_path / "run", "ppo", 320, BOUND="3600", JAX_COMPILATION_CACHE_DIR="")
    wait_for(process, "compiling")
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert ends(process, 128 + signal.SIGTERM)
    assert time.monotonic() - sent < 10  # a promise, kept by a thread of its own


@pytest.mark.slow
def test_a_run_stopped_while_collecting_and_saving_ends_like_the_undisturbed_one(
    start, undisturbed, tmp_path
):
    run, steps = tmp_path / "run", 60 * STEPS_PER_ITERATION
    process = start(run, "ppo", steps)
    assert wait_for_step(process, run, 6 * STEPS_PER_ITERATION)
    process.send_signal(signal.SIGTERM)  # while collecting: saves, and says so
    assert ends(process, 128 + signal.SIGTERM)
    first = Checkpointer(run / "checkpoints").latest_step()
    assert first >= 6 * STEPS_PER_ITERATION

    process = start(run, "ppo", steps, HOLD="saving", BOUND="3600")
    wait_for(process, "saving")  # and stays there: as a disk that does not answer
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)  # the first signal waits for the save
    process.send_signal(signal.SIGINT)
    assert ends(process, 128 + signal.SIGINT)  # the second does not

    process = start(run, "ppo", steps, HOLD="saving")
    wait_for(process, "saving")
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert ends(process, 128 + signal.SIGTERM, f"step {first:,} is on disk. Go on with")
    assert time.monotonic() - sent < 10  # a promise, kept by a timer in a thread of its own
    assert Checkpointer(run / "checkpoints").latest_step() == first
    assert ends(start(run, "ppo", steps), 0)
    assert same_run(undisturbed("ppo", 60), run, agent_named("ppo"))


# Disks and directories.


@pytest.fixture(scope="module")
def ppo():
    return small("ppo", DRIFT)


@pytest.fixture
def train(ppo, monkeypatch):
    """train(steps, run, **options): rows and checkpoints of every iteration, no waiting."""
    quick = functools.partial(Checkpointer, retry_seconds=0)
    monkeypatch.setattr(run_module, "Checkpointer", quick)

    def run(steps, directory=None, **options):
        intervals = {"log_interval": 32, "checkpoint_interval": 32}
        return ppo.train(steps, checkpoint_dir=directory, **intervals, **QUIET, **options)

    return run


@pytest.fixture(scope="module")
def whole(ppo, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    intervals = {"log_interval": 32, "checkpoint_interval": 32}
    ppo.train(192, checkpoint_dir=path, **intervals, **QUIET)
    return path


def test_a_save_that_fails_is_warned_of_and_the_next_one_stands(
    ppo, train, whole, tmp_path, monkeypatch
):
    from jaxroll.train import step_files

    write, calls = step_files.write_shards, []

    def sometimes(path, *args):
        calls.append(path.stem)
        if calls[-1].startswith(("0000000064", "0000000096")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args)

    monkeypatch.setattr(step_files, "write_shards", sometimes)
    with pytest.warns(CheckpointWarning, match=r"could not save.*No space left") as warned:
        train(192, tmp_path / "run")
    assert len(warned) == 2
    assert calls.count("0000000064") == 3  # tried again before it is given up
    assert Checkpointer(tmp_path / "run/checkpoints").steps() == [128, 160, 192]
    assert same_run(whole, tmp_path / "run", ppo)


def test_a_full_disk_takes_neither_rows_nor_checkpoints_and_the_run_goes_on(
    ppo, train, whole, tmp_path
):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event):  # no file may grow beyond what the metrics have now
        if event.step == 64:
            size = (tmp_path / "run/metrics.jsonl").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        if event.step == 128:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    try:
        with pytest.warns((CheckpointWarning, LogWarning)) as warned:
            train(192, tmp_path / "run", callbacks=[fill])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    text = "\n".join(str(warning.message) for warning in warned)
    assert "a row of metrics could not be written" in text
    assert "could not save" in text
    assert same_run(whole, tmp_path / "run", ppo)


def test_a_directory_deleted_while_running_comes_back_and_the_run_says_so(
    ppo, train, whole, tmp_path
):
    run = tmp_path / "run"

    def delete(event):
        if event.step == 96:
            shutil.rmtree(run, ignore_errors=True)

    def config():
        (run / "config.toml").write_text("mine")

    with pytest.warns((CheckpointWarning, LogWarning)) as warned:
        train(192, run, callbacks=[delete], on_begin=config)
    text = "\n".join(str(warning.message) for warning in warned)
    assert "checkpoints was deleted while it was in use" in text
    assert "metrics.jsonl was deleted while the run wrote it" in text
    assert (run / "config.toml").read_text() == "mine"
    with pytest.raises(FileExistsError):
        train(64, run)
    assert same_run(whole, run, ppo)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))]
)
def test_a_run_whose_writes_fail_now_and_then_says_so_or_is_whole(
    ppo, train, whole, tmp_path, seed, monkeypatch
):
    draw, failures = random.Random(seed), []

    def sometimes(function):
        def write(*args, **kwargs):
            if draw.random() < 0.1:
                failures.append(function.__name__)
                raise OSError(draw.choice([errno.EIO, errno.ENOSPC]), "injected")
            return function(*args, **kwargs)

        return write

    with warnings.catch_warnings(record=True) as warned, monkeypatch.context() as patch:
        warnings.simplefilter("always")
        for name in ("write", "fsync", "replace", "rename"):
            patch.setattr(os, name, sometimes(getattr(os, name)))
        try:
            train(192, tmp_path / "run", loggers="csv")
        except (OSError, CheckpointError):
            return  # before anything was trained
    assert failures
    try:
        is_same = same_run(whole, tmp_path / "run", ppo)
    except (AssertionError, CheckpointError):
        is_same = False
    told = [x for x in warned if issubclass(x.category, CheckpointWarning | LogWarning)]
    assert told or is_same


def damage(step):
    """Flip a byte of the largest file of a step."""
    path = max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_after_damage_the_run_goes_on_from_the_step_before_with_each_row_once(
    ppo, train, whole, tmp_path
):
    run = tmp_path / "run"
    train(128, run)
    damage(run / "checkpoints" / "0000000128")
    with pytest.warns(CheckpointWarning, match=r"step 128 is skipped.*Going back to step 96"):
        train(192, run, resume=True)
    assert same_run(whole, run, ppo)


def test_when_every_step_is_damaged_nothing_starts_over_and_no_row_is_lost(train, tmp_path):
    run = tmp_path / "run"
    train(64, run)
    rows = rows_of(run)
    for step in (run / "checkpoints").glob("0*"):
        (step / "manifest.json").write_text("{")
    with pytest.raises(DamagedError, match="no intact step"):
        train(128, run, resume=True)
    assert rows_of(run) == rows


def test_a_run_without_a_checkpoint_starts_over_and_another_directory_is_refused(
    ppo, train, whole, tmp_path
):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / "metrics.jsonl").write_text('{"step": 32, "loss": 1.0}\n{"st')
    train(192, run, resume=True)
    assert same_run(whole, run, ppo)
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").touch()
    with pytest.raises(NoCheckpointError, match=r"no checkpoint to resume from, but letter\.txt"):
        train(64, other, resume=True)
    assert [path.name for path in other.iterdir()] == ["letter.txt"]


@pytest.fixture
def too_late(monkeypatch):
    """From here on it is an error to get as far as compiling."""
    monkeypatch.setattr(run_module, "make_program", lambda *a: pytest.fail("too late"))


@pytest.mark.usefixtures("too_late")
def test_a_directory_in_use_names_the_process_before_anything_is_compiled(train, tmp_path):
    pid = f"process {os.getpid()} "
    with RunLock(tmp_path), pytest.raises(LockedError, match=f"in use by {pid}.*Stop that"):
        train(64, tmp_path)


@pytest.mark.usefixtures("too_late")
def test_a_directory_that_cannot_be_written_is_refused_before_anything_is_compiled(train, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write to the run directory.*Choose"):
        train(64, tmp_path / "file" / "run")


@pytest.mark.usefixtures("too_late")
@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket/run"])
def test_a_remote_directory_is_refused_before_anything_is_compiled(
    train, path, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must be a path on this machine"):
        train(64, path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("too_late")
def test_checkpoints_that_cannot_be_written_are_noticed_before_anything_is_compiled(
    train, tmp_path
):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match=r"no checkpoint can be saved in .*checkpoints: .*"):
        train(64, tmp_path)


@pytest.mark.usefixtures("too_late")
def test_a_new_run_is_not_written_over_what_an_earlier_one_left(tmp_path, train):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 32}\n')
    with pytest.raises(FileExistsError, match=r"before its first checkpoint.*resume=True to start"):
        train(64, tmp_path)
    assert metrics.read_text() == '{"step": 32}\n'
    metrics.write_text("")
    (tmp_path / "checkpoints" / "0000000032").mkdir(parents=True)
    with pytest.raises(FileExistsError, match=r"all damaged. Use resume=True to see"):
        train(64, tmp_path)


# Numbers.


def test_a_stop_at_a_bad_gradient_says_what_is_left(tmp_path):
    from jaxroll.envs import autoreset

    agent = small("ppo", autoreset(Poison(after=10)), normalize_observations=True)
    with pytest.raises(hooks.NonFiniteError, match=r"by step 64.*nothing was saved before it"):
        agent.train(256, log_interval=32, **QUIET)
    options = {"checkpoint_dir": tmp_path, "log_interval": 32, "checkpoint_interval": 32, **QUIET}
    with pytest.raises(
        hooks.NonFiniteError, match=r"by step 64.*checkpoint, of step 32, is finite"
    ):
        agent.train(256, **options)
    kept = agent.load(tmp_path)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(kept.learner.params))
    assert [row["step"] for row in rows_of(tmp_path)] == [32]
    # The run can go on past it, each row once; the bad updates are counted.
    _, history = agent.train(96, resume=True, nonfinite="skip", **options)
    assert history.steps.tolist() == [32, 64, 96]
    assert history["skipped_updates"].tolist()[0] == 0
    assert history["skipped_updates"][1] > 0


# Mistakes.

_wild = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.integers(2**31, 2**80),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=2),
    st.lists(st.integers(-1, 2) | st.text(max_size=2), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers() | st.complex_numbers(), max_size=1),
    st.builds(object),
    st.just(np.zeros(2)),
    st.just(len),
    st.just(CLOCK),
)
_OPTIONS = [
    *("seed", "state", "mesh", "reduction", "num_learners", "checkpoint_interval", "resume"),
    *("keep_checkpoints", "init_model_path", "callbacks", "loggers", "log_interval", "config"),
    *("eval_interval", "num_eval_episodes", "eval_env", "target_return", "time_budget"),
    *("nonfinite", "progress", "num_train_steps", "keep_best", "on_begin"),
]


class Compiling(Exception):
    """All checks were passed."""


@settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(options=st.dictionaries(st.sampled_from(_OPTIONS), _wild, min_size=1, max_size=2))
@example(options={"init_model_path": ""})
@example(options={"eval_env": ""})
def test_no_mistake_in_the_options_gets_past_our_checks(options, ppo, monkeypatch):
    def stop(*args):
        raise Compiling

    monkeypatch.setattr(run_module, "make_program", stop)
    allowed = (Compiling, ValueError, TypeError, FileNotFoundError)
    with pytest.raises(allowed) as caught:
        ppo.train(**{"num_train_steps": 64, **QUIET, **options})
    if caught.type is not Compiling:
        assert _is_ours(caught.value)
        assert str(caught.value)


@pytest.mark.usefixtures("too_late")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 2**32}, r"seed must be in \[0, 2\*\*32\)"),
        ({"num_train_steps": float("inf")}, "num_train_steps must be an integer, got inf"),
        ({"num_train_steps": 2**63}, r"num_train_steps must be below 2\*\*63"),
        ({"log_interval": 1.5}, "log_interval must be an integer, got 1.5"),
        ({"loggers": "cvs"}, "unknown logger 'cvs'"),
        ({"loggers": "csv"}, "give a directory"),
        ({"callbacks": [3]}, "a callback is a function of an Event, got 3"),
        ({"callbacks": print}, "callbacks must be a list of functions"),
        ({"config": {"a": 1j}}, "config must hold numbers"),
        ({"eval_env": CLOCK}, "eval_env must have the agent's observation_space"),
        ({"state": {"params": 1}}, "state must be a TrainState"),
        ({"state": 1, "init_model_path": "a"}, "either state, .* or init_model_path, not both"),
        ({"mesh": 8}, r"mesh must be a mesh, got 8. Use .*make_mesh"),
    ],
)
def test_a_mistake_is_told_before_anything_is_compiled(ppo, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ppo.train(**{"num_train_steps": 64, **QUIET, **options})


def test_rows_of_a_run_are_json_that_others_can_read(whole):
    for line in (whole / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
