"""Loggers: each row once, after any kill and any resume."""

import csv
import errno
import json
import math
import os
import resource
import shutil
import struct
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxroll.train import CsvLogger, History, JsonlLogger, TensorBoardLogger, make_loggers
from jaxroll.train.files import LogWarning


def row(step):
    values = {"step": step, "episode_return": 1.5 * step, "note": 'a "ü", b'}
    return values | ({"eval_episode_return": float(step)} if step % 3 == 0 else {})


def write(logger_type, path, steps, **options):
    with logger_type(path, **options) as log:
        for step in steps:
            log(row(step))


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 8),
    checkpoint=st.integers(0, 8),
    cut=st.floats(0, 1),
    kind=st.sampled_from([JsonlLogger, CsvLogger]),
)
def test_resume_after_a_kill_at_any_byte_leaves_each_row_once(
    tmp_path_factory, num_rows, checkpoint, cut, kind
):
    directory = tmp_path_factory.mktemp("run")
    whole, path = directory / "whole", directory / "cut"
    write(kind, whole, range(1, 10))
    checkpoint = min(checkpoint, num_rows)
    write(kind, path, range(1, checkpoint + 1))
    safe = path.stat().st_size  # rows up to the checkpoint were on disk before it
    write(kind, path, range(checkpoint + 1, num_rows + 1))
    content = path.read_bytes()
    if kind is CsvLogger and content.count(b"\n") and num_rows >= 3 > checkpoint:
        safe = content.index(b"\n") + 1  # a new column rewrote the file, whole
        checkpoint = 0
    path.write_bytes(content[: safe + int(cut * (len(content) - safe))])
    write(kind, path, range(checkpoint + 1, 10), resume_from_step=checkpoint)
    assert read(kind, path) == read(kind, whole)
    assert not list(directory.glob("*.tmp"))


def read(kind, path):
    if kind is JsonlLogger:
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_jsonl_without_a_resume_step_continues_and_repairs_half_a_line(tmp_path):
    path = tmp_path / "m.jsonl"
    write(JsonlLogger, path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "epis')
    assert History.read(path).steps.tolist() == [1, 2]  # a reader of a live file sees whole rows
    write(JsonlLogger, path, [3])
    assert [r["step"] for r in read(JsonlLogger, path)] == [1, 2, 3]


def test_row_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    log = JsonlLogger(tmp_path / "deep" / "m.jsonl")
    log({"step": 1})
    assert (tmp_path / "deep" / "m.jsonl").read_text() == '{"step": 1}\n'
    log.close()


def test_row_without_a_step_belongs_to_the_row_before(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"note": "kept"}\n{"step": 2}\n{"note": "dropped"}\n')
    JsonlLogger(path, resume_from_step=1).close()
    assert path.read_text() == '{"step": 1}\n{"note": "kept"}\n'


def test_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"st\x00\n{"step": 2}\n')
    with pytest.warns(UserWarning, match="line 2 is damaged"):
        assert History.read(path).steps.tolist() == [1, 2]


def test_failed_replacement_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    write(JsonlLogger, path, [1, 2, 3])
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        JsonlLogger(path, resume_from_step=1)
    assert path.read_bytes() == before


@pytest.fixture
def disk():
    """disk(size): no file may grow beyond it; disk(None): there is room again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    limit(None)


@pytest.mark.parametrize("kind", [JsonlLogger, CsvLogger])
@pytest.mark.parametrize("more", [1, 200])  # rows: within a buffer of Python's, and beyond it
def test_rows_that_a_full_disk_does_not_take_are_written_when_there_is_room(
    kind, more, tmp_path, disk
):
    path, whole = tmp_path / "rows", tmp_path / "whole"
    write(kind, whole, range(1, more + 4))
    with kind(path) as log:
        log(row(1))
        disk(path.stat().st_size + 5)  # half a line fits
        for step in range(2, more + 2):  # of these, some bring a new column
            with pytest.raises(OSError, match="too large"):
                log(row(step))
        disk(None)
        log(row(more + 2))
        log(row(more + 3))
    assert read(kind, path) == read(kind, whole)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_column_that_cannot_be_added_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "m.csv"
    with CsvLogger(path) as log:
        log({"step": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            for step in (2, 3):
                with pytest.raises(OSError, match="disk full"):
                    log({"step": step, "loss": 0.5})
            assert path.read_text() == "step\n1\n"
            assert [p.name for p in tmp_path.iterdir()] == ["m.csv"]
        log({"step": 4})
    assert path.read_text() == "step,loss\n1,\n2,0.5\n3,0.5\n4,\n"


def test_tensorboard_says_that_the_disk_is_full_and_goes_on_when_it_is_not(tmp_path, disk):
    with TensorBoardLogger(tmp_path) as log:
        log({"step": 1, "loss": 1.0})
        disk(log.path.stat().st_size + 5)
        for step in range(2, 50):  # the thread of tensorboardX's own writer would be dead by now
            with pytest.raises(OSError, match="too large"):
                log({"step": step, "loss": 1.0})
        disk(None)
        log({"step": 50, "loss": 1.0})
    steps = [event.step for event in events(tmp_path) if event.summary.value]
    assert steps == list(range(1, 51))


@pytest.mark.parametrize("kind", [JsonlLogger, CsvLogger])
def test_a_file_cut_inside_a_character_is_continued(kind, tmp_path):
    whole, path = tmp_path / "whole", tmp_path / "cut"
    for file in (whole, path):
        with kind(file) as log:
            log({"step": 1, "note": "ü"})
            log({"step": 2, "note": "ü"})
    data = path.read_bytes()
    # JSON escapes it; another program's file need not.
    data = data.replace(b"\\u00fc", "ü".encode())
    path.write_bytes(data[: data.rindex("ü".encode()) + 1])
    with kind(path, resume_from_step=1) as log:
        log({"step": 2, "note": "ü"})
    assert read(kind, path) == read(kind, whole)


def test_bytes_that_are_no_text_in_a_csv_spoil_their_cell_only(tmp_path):
    path = tmp_path / "m.csv"
    path.write_bytes(b"step,note\n1,\xfc\n2,b\n3\n4,d\n")
    with pytest.warns(LogWarning, match="1 damaged lines"), CsvLogger(path, 4) as log:
        log({"step": 5, "note": "e", "new": 1})
    got = [(row["step"], row["note"]) for row in read(CsvLogger, path)]
    assert got == [("1", "\ufffd"), ("2", "b"), ("4", "d"), ("5", "e")]


@pytest.mark.parametrize("kind", [JsonlLogger, CsvLogger, TensorBoardLogger])
def test_rows_of_a_directory_that_is_deleted_meanwhile_are_all_there(kind, tmp_path):
    directory = tmp_path / "run"
    with kind(directory if kind is TensorBoardLogger else directory / "rows") as log:
        log({"step": 1})
        shutil.rmtree(directory)
        with pytest.warns(LogWarning, match="was deleted .* with all its rows"):
            log({"step": 2, "loss": 0.5})
        log({"step": 3, "loss": 0.25})  # said once
    if kind is TensorBoardLogger:
        steps = [event.step for event in events(directory)]
        assert steps == [0, 1, 2, 3]
    else:
        assert [int(row["step"]) for row in read(kind, directory / "rows")] == [1, 2, 3]
    assert len(list(directory.iterdir())) == 1


def test_rows_go_on_in_the_file_that_an_editor_saved(tmp_path):
    path = tmp_path / "rows"
    with JsonlLogger(path) as log:
        log({"step": 1})
        (tmp_path / "edited").write_text('{"step": 1, "note": "mine"}\n')
        os.replace(tmp_path / "edited", path)
        with pytest.warns(LogWarning, match="replaced by another file"):
            log({"step": 2})
    assert read(JsonlLogger, path) == [{"step": 1, "note": "mine"}, {"step": 2}]


@pytest.mark.parametrize("function", ["write", "fsync", "replace", "open"])
def test_no_failing_call_of_the_system_loses_a_row_without_a_word(function, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    real, calls = getattr(os, function), []

    def run(directory, failing):
        def sometimes(*args, **kwargs):
            calls.append(args)
            if len(calls) in failing:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **kwargs)

        calls.clear()
        with warnings.catch_warnings(record=True) as warned, monkeypatch.context() as patch:
            warnings.simplefilter("always")
            log = make_loggers("csv", directory)
            patch.setattr(os, function, sometimes)
            for step in range(1, 5):
                log(row(step))
                log.sync()
            log.close()
        return [str(w.message) for w in warned]

    assert run(whole, ()) == []
    count = len(calls)
    assert count or function == "open"
    for first in range(1, count + 1):
        for failing in ({first}, range(first, 100)):
            directory = tmp_path / f"{first}-{len(failing)}"
            said = run(directory, failing)
            assert any("Input/output error" in text for text in said)
            lost = any("are lost" in text for text in said)
            for kind, name in ((JsonlLogger, "metrics.jsonl"), (CsvLogger, "metrics.csv")):
                same = read(kind, directory / name) == read(kind, whole / name)
                assert same or lost
            assert len(said) <= 4  # at most one of each logger, and one at its end


def test_a_full_disk_is_named_by_the_path(tmp_path, disk):
    with JsonlLogger(tmp_path / "rows") as log:
        disk(0)
        with pytest.raises(OSError, match="rows") as caught:
            log({"step": 1})
        assert caught.value.filename == str(tmp_path / "rows")
        disk(None)


def test_numbers_of_every_kind_become_valid_json(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonlLogger(path) as log:
        log(
            {
                "step": np.int64(2**40),
                "nan": math.nan,
                "inf": -math.inf,
                "numpy": np.float32(0.5),
                "jax": jnp.float32(0.25),
                "array": np.array([1.0, np.nan]),
                "flag": np.bool_(True),
                "none": None,
            }
        )

    def forbid(name):
        raise ValueError(name)

    got = json.loads(path.read_text(), parse_constant=forbid)
    assert got == {
        "step": 2**40,
        "nan": None,
        "inf": None,
        "numpy": 0.5,
        "jax": 0.25,
        "array": [1.0, None],
        "flag": True,
        "none": None,
    }


def test_row_of_something_else_is_refused(tmp_path):
    with JsonlLogger(tmp_path / "m.jsonl") as log, pytest.raises(TypeError, match="numbers"):
        log({"step": 1, "what": object()})
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_csv_grows_columns_and_keeps_earlier_rows(tmp_path):
    path = tmp_path / "m.csv"
    with CsvLogger(path) as log:
        log({"step": 1, "loss": math.nan})
        log({"step": 2, "loss": 0.5, "eval": 3.0, "note": "two\nlines, one cell"})
        log({"step": 3, "eval": 4.0})
    want = 'step,loss,eval,note\n1,,,\n2,0.5,3.0,"two lines, one cell"\n3,,4.0,\n'
    assert path.read_text() == want


def events(directory):
    """The records of TensorBoard's files: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(directory.glob("events*")):
        data, position = path.read_bytes(), 0
        while position < len(data):
            (length,) = struct.unpack("<Q", data[position : position + 8])
            yield Event.FromString(data[position + 12 : position + 12 + length])
            position += length + 16


def test_tensorboard_events_can_be_read_back(tmp_path):
    with TensorBoardLogger(tmp_path) as log:
        log({"step": 5, "loss": 0.5, "bad": math.nan, "note": "x", "returns": [1.0, 2.0]})
        log({"step": 10, "loss": 0.25})
    got = {
        (value.tag, event.step): value.simple_value
        for event in events(tmp_path)
        for value in event.summary.value
    }
    want = {("loss", 5): 0.5, ("loss", 10): 0.25, ("returns/0", 5): 1.0, ("returns/1", 5): 2.0}
    assert got == want


def test_tensorboard_missing_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"jaxroll\[tensorboard\]"):
        TensorBoardLogger(tmp_path)
    with pytest.raises(ImportError, match=r"jaxroll\[tensorboard\]"):
        make_loggers("tensorboard", tmp_path)


def test_make_loggers_always_writes_jsonl_and_calls_functions(tmp_path):
    rows, closed = [], []

    class Mine:
        def __call__(self, row):
            rows.append(row)

        def close(self):
            closed.append(True)

    with make_loggers(["csv", Mine(), rows.append], tmp_path) as log:
        log({"step": 1})
    assert rows == [{"step": 1}, {"step": 1}]
    assert closed == [True]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]
    with make_loggers("csv", tmp_path, resume_from_step=0) as log:
        log({"step": 7})
    assert History.read(tmp_path).steps.tolist() == [7]


def test_make_loggers_errors_come_before_any_file(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'tensorboard'"):
        make_loggers("tensorbord", tmp_path)
    with pytest.raises(ValueError, match="unknown logger 3"):
        make_loggers([3], tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="give a directory"):
        make_loggers("csv")
