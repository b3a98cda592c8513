"""Histories: tidy rows in, columns, frames and tables out."""

import sys

import numpy as np
import pytest

from jaxroll.train import History, JsonlLogger


@pytest.fixture
def history():
    rows = [{"step": 100 * i, "episode_return": 10.0 * i, "fps": 4.2e4} for i in range(1, 21)]
    rows[9]["eval_episode_return"] = 99.0
    return History(rows)


def test_column_has_nan_where_missing(history):
    column = history["eval_episode_return"]
    assert column.dtype == np.float64
    assert column[9] == 99.0
    assert np.isnan(np.delete(column, 9)).all()
    assert history.last("eval_episode_return") == 99.0
    assert history.steps.dtype == np.int64
    assert history.steps[-1] == 2000
    assert len(history) == 20


def test_unknown_column_names_a_near_one(history):
    with pytest.raises(KeyError, match="Did you mean 'episode_return'"):
        history["episode_retrun"]


def test_records_are_copies(history):
    history.to_records()[0]["step"] = -1
    next(iter(history))["step"] = -1
    assert history.steps[0] == 100


def test_read_gives_what_was_logged(history, tmp_path):
    with JsonlLogger(tmp_path / "metrics.jsonl") as log:
        for row in history:
            log(row)
    assert History.read(tmp_path) == history
    assert History.read(tmp_path / "metrics.jsonl") == history
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        History.read(tmp_path / "nowhere")


def test_append_is_a_logger_that_keeps_plain_numbers():
    history = History()
    history.append({"step": np.int32(3), "loss": np.float32(0.5), "kl": np.nan})
    assert history.to_records() == [{"step": 3, "loss": 0.5, "kl": None}]


def test_concat_adds_a_seed_column_and_select_takes_it_apart(history):
    both = History.concat([history, history])
    assert both["seed"].tolist() == [0.0] * 20 + [1.0] * 20
    again = both.select(seed=1)
    assert again["episode_return"].tolist() == history["episode_return"].tolist()
    with pytest.raises(ValueError, match="one seed for each of the 2 histories, got 3"):
        History.concat([history, history], seed=[1, 2, 3])


def test_pandas_frame_has_a_column_for_each_name(history):
    frame = history.to_pandas()
    assert list(frame.columns) == history.names
    assert frame["episode_return"].iloc[-1] == 200.0


def test_without_pandas_the_error_says_what_to_do(history, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        history.to_pandas()


def test_repr_shows_both_ends_and_fits_on_a_screen(history):
    lines = repr(history).splitlines()
    assert lines[0] == "History(20 rows × 4 columns, steps 100 … 2,000)"
    assert len(lines) == 1 + 1 + 4 + 1 + 4
    assert len({len(line.rstrip()) for line in lines[2:4]}) == 1  # aligned
    assert "2,000" in lines[-1]
    assert repr(History()) == "History(empty)"
    assert History()._repr_html_().startswith("<p>History(empty)")
    assert "<script>" not in History([{"step": 1, "x": "<script>"}])._repr_html_()
