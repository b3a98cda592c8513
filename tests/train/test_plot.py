"""Plots: the right numbers, labels and files."""

import json
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest

from jaxroll.train import History, JsonlLogger, plot_runs
from jaxroll.train.plot import take_together


def run(seed=0, num_rows=40, total=1_000_000, **extra):
    rng = np.random.default_rng(seed)
    steps = np.linspace(total / num_rows, total, num_rows).astype(int)
    rows = [
        {"step": int(s), "episode_return": 500 * s / total + rng.normal(), "fps": 4e4, **extra}
        for s in steps
    ]
    return History(rows)


def save(history, directory, **config):
    with JsonlLogger(directory / "metrics.jsonl") as log:
        for row in history:
            log(row)
    if config:
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in config.items()]
        (directory / "config.toml").write_text("".join(lines))
    return directory


def texts(figure):
    figure.canvas.draw()
    axis = figure.axes[0]
    legend = figure.legends[0].get_texts() if figure.legends else []
    return {t.get_text() for t in [*legend, *axis.get_xticklabels()]}


def test_band_is_minimum_and_maximum_over_seeds():
    seeds = [run(seed) for seed in range(4)]
    axis = plot_runs([seeds], "episode_return").axes[0]
    columns = np.stack([h["episode_return"] for h in seeds])
    np.testing.assert_allclose(axis.lines[0].get_ydata(), columns.mean(axis=0))
    outline = axis.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose(outline[:, 1].max(), columns.max())
    assert axis.get_title(loc="left") == "mean over 4 seeds, band: min–max"


def test_std_and_bootstrap_bands():
    values = np.random.default_rng(0).normal(size=(20, 3))
    grid = np.arange(3.0)
    seeds = [(grid, v) for v in values]
    std = take_together(seeds, "std")
    np.testing.assert_allclose(std.high - std.mean, values.std(axis=0))
    ci = take_together(seeds, "ci")
    # For 20 seeds the bootstrap is near the normal interval of the mean.
    np.testing.assert_allclose(ci.high - ci.low, 2 * 1.96 * values.std(axis=0) / 20**0.5, rtol=0.15)
    assert ((ci.low < ci.mean) & (ci.mean < ci.high)).all()
    np.testing.assert_array_equal(ci.low, take_together(seeds, "ci").low)


def test_seeds_on_other_steps_are_interpolated_and_not_extrapolated():
    curve = take_together(
        [(np.array([0.0, 2.0]), np.array([0.0, 2.0])), (np.array([1.0, 3.0]), np.array([5.0, 7.0]))]
    )
    np.testing.assert_array_equal(curve.x, [0, 1, 2, 3])
    np.testing.assert_array_equal(curve.mean, [0, 3, 4, 7])
    assert take_together([(np.empty(0), np.empty(0))]) is None


def test_axes_are_readable_and_lines_are_named():
    figure = plot_runs({"PPO": run(), "A2C": run(1)}, title="CartPole-v1")
    shown = texts(figure)
    assert {"PPO", "A2C", "200k", "1M"} <= shown
    assert figure.axes[0].get_xlabel() == "steps"
    assert figure.axes[0].get_ylabel() == "episode return"
    assert figure.get_suptitle() == "CartPole-v1"
    colours = {line.get_color() for line in figure.axes[0].lines}
    assert len(colours) == 2


def test_lines_that_end_apart_get_a_legend():
    figure = plot_runs({"short": run(total=500_000), "long": run()})
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["short", "long"]


def test_ticks_close_together_stay_apart():
    rows = [{"step": 10_000_000 + i, "x": 1.0} for i in range(50)]
    figure = plot_runs(History(rows), "x")
    figure.canvas.draw()
    labels = [t.get_text() for t in figure.axes[0].get_xticklabels()]
    assert len(set(labels)) == len(labels)


def test_one_chart_for_each_name_and_a_run_without_it_is_left_out():
    figure = plot_runs(
        {"ppo": run(), "impala": run(1, policy_lag=3.5)}, ["episode_return", "fps", "policy_lag"]
    )
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 1]
    assert [axis.get_ylabel() for axis in figure.axes] == [
        "episode return",
        "steps per second",
        "policy lag",
    ]
    assert figure.axes[2].lines[0].get_color() == figure.axes[0].lines[1].get_color()
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["ppo", "impala"]


def test_seed_column_makes_the_seeds_of_one_line():
    figure = History.concat([run(0), run(1)]).plot()
    assert len(figure.axes[0].lines) == 1
    assert "mean over 2 seeds" in figure.axes[0].get_title(loc="left")


def test_directories_that_differ_in_their_seed_share_a_line(tmp_path):
    directories = [
        save(run(i), tmp_path / f"ppo-{i}", agent="ppo", env="CartPole-v1", seed=i)
        for i in range(3)
    ]
    other = save(run(9), tmp_path / "other", agent="ppo", env="CartPole-v1", learning_rate=1e-3)
    bare = save(run(8), tmp_path / "bare")
    figure = plot_runs([*directories, other, str(bare)])
    assert [line.get_label() for line in figure.axes[0].lines] == [
        f"ppo CartPole-v1, {directories[0]}",
        f"ppo CartPole-v1, {other}",
        "bare",
    ]
    assert "mean over 1–3 seeds" in figure.axes[0].get_title(loc="left")
    renamed = plot_runs([*directories, other, bare], labels=["a", "b", "c"])
    assert [line.get_label() for line in renamed.axes[0].lines] == ["a", "b", "c"]
    assert plot_runs(directories).get_suptitle() == "ppo CartPole-v1"


def test_smoothing_is_off_and_when_on_said_so():
    history = run()
    raw, smooth = history.plot(), history.plot(smooth=5)
    np.testing.assert_array_equal(raw.axes[0].lines[0].get_ydata(), history["episode_return"])
    want = np.convolve(history["episode_return"], np.ones(5) / 5, "valid")
    np.testing.assert_allclose(smooth.axes[0].lines[0].get_ydata()[2:-2], want)
    assert raw.axes[0].get_title(loc="left") == ""
    assert smooth.axes[0].get_title(loc="left") == "averaged over 5 rows"


def test_files_are_written_and_the_same_each_time(tmp_path):
    png, svg, pdf = (tmp_path / "new" / f"curve.{kind}" for kind in ("png", "svg", "pdf"))
    for path in (png, svg, pdf):
        plot_runs({"PPO": [run(0), run(1)], "A2C": run(2)}, title="CartPole-v1", out=path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 10_000
    assert pdf.read_bytes().startswith(b"%PDF")
    words = {e.text for e in ElementTree.parse(svg).iter() if e.tag.endswith("}text")}
    assert {"CartPole-v1", "PPO", "A2C", "1M", "steps"} <= words
    first = svg.read_bytes()
    plot_runs({"PPO": [run(0), run(1)], "A2C": run(2)}, title="CartPole-v1", out=svg)
    assert svg.read_bytes() == first


def test_user_backend_and_axes_are_respected():
    from matplotlib.figure import Figure

    backend, parameters = matplotlib.get_backend(), dict(matplotlib.rcParams)
    mine = Figure()
    axis = mine.subplots()
    assert run().plot("fps", ax=axis) is mine
    assert len(axis.lines) == 1
    assert axis.get_ylabel() == "steps per second"
    assert matplotlib.get_backend() == backend
    assert dict(matplotlib.rcParams) == parameters
    axis = mine.add_subplot()
    plot_runs({"PPO": run(), "A2C": run(1)}, ax=axis)
    assert [t.get_text() for t in axis.get_legend().get_texts()] == ["PPO", "A2C"]


def test_errors_come_with_a_way_out(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'episode_return'"):
        run().plot("episode_retrun")
    with pytest.raises(ValueError, match=r"\.png.*\.svg.*\.pdf"):
        run().plot(out=tmp_path / "x.jpeg2")
    with pytest.raises(ValueError, match="band must be"):
        run().plot(band="sem")
    with pytest.raises(ValueError, match="smooth"):
        run().plot(smooth=0)
    with pytest.raises(ValueError, match="no runs were given"):
        plot_runs([])
    with pytest.raises(ValueError, match="no rows"):
        plot_runs([History()])
    with pytest.raises(TypeError, match=r"History\(rows\)"):
        plot_runs([[{"step": 1}]])
    with pytest.raises(FileNotFoundError, match="no history"):
        plot_runs([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="labels must name"):
        plot_runs([run()], labels=["a", "b"])
