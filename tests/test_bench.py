"""The benchmarks run, and say what they measured; never that anything is fast."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import learners
from jaxroll.bench import SECTIONS, main
from jaxroll.bench.harness import (
    Ratio,
    Row,
    Settings,
    Spread,
    check_agreement,
    measure,
    repeated,
)
from jaxroll.bench.report import as_markdown, machine


def test_contenders_take_turns_in_changing_order():
    calls = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    row = measure("s", "c", contenders, [Ratio("a", "b")], Settings(seconds=0, rounds=2))
    assert calls == ["a", "b", "a", "b", "a", "b", "b", "a"]
    assert row.rounds == 2
    assert row.ratios[0][0].label == "a / b"


def test_a_ratio_without_its_contender_is_left_out():
    row = measure("s", "c", {"a": lambda: None}, [Ratio("a", "b")], Settings(seconds=0, rounds=1))
    assert row.ratios == []


@pytest.mark.parametrize(
    ("ratio", "value", "met"),
    [
        (Ratio("a", "b", at_least=2), 1.9, False),
        (Ratio("a", "b", at_least=2), 2.0, True),
        (Ratio("a", "b", at_most=1.1), 1.2, False),
        (Ratio("a", "b"), 5.0, None),
    ],
)
def test_a_target_is_met_or_missed(ratio, value, met):
    assert ratio.met(value) is met


def test_a_row_survives_the_way_through_json():
    row = Row("s", "c", rounds=3, steps=4, notes=["n"], temporary_bytes={"a": 1})
    row.times = {"a": Spread(1.0, 0.5, 2.0)}
    row.ratios = [(Ratio("a", "b, c", at_least=1.25, at_most=3), Spread(2.0, 1.0, 3.0))]
    assert Row.from_json(json.loads(json.dumps(row.as_json()))) == row


def test_repeated_calls_give_the_result_of_one():
    program = repeated(lambda x: x * 2 + 1, jnp.arange(3.0))
    for count in (1, 5):
        tie, result = program(count)
        assert int(tie) == count
        np.testing.assert_array_equal(result, [1.0, 3.0, 5.0])


def test_contenders_that_disagree_are_an_error():
    functions = {"a": lambda x: x, "b": lambda x: x + 1}
    with pytest.raises(AssertionError, match="a and b differ"):
        check_agreement(functions, (jnp.zeros(2),), ["a", "b"])


def test_the_table_shows_targets_and_memory():
    row = Row("gae", "(1, 2)", temporary_bytes={"jaxroll": 2000})
    row.ratios = [(Ratio("x", "jaxroll", at_least=4), Spread(5.0, 4.0, 6.0))]
    text = as_markdown([row], machine(), "jaxroll bench gae", "wall", {"gae": "GAE"})
    assert "| (1, 2) |" in text
    assert "x / jaxroll = **5.00** (4.00–6.00) | ≥ 4 | met |" in text
    assert "temporary memory jaxroll 2.0 kB" in text


def test_an_unknown_section_names_the_nearest(capsys):
    assert main(["vtraces"]) == 2
    assert "Did you mean 'vtrace'?" in capsys.readouterr().err


def test_the_quick_kernels_run_and_write_their_results(tmp_path, capsys):
    assert main(["gae", "--quick", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "results.json").read_text())
    (row,) = data["rows"]
    assert {"jaxroll", "purejaxrl form", "roofline"} <= row["times"].keys()
    assert data["command"].startswith("jaxroll bench gae --quick")
    assert "## GAE" in (tmp_path / "RESULTS.md").read_text()
    assert "jaxroll / roofline" in capsys.readouterr().out
    main(["vtrace", "--quick", "--out", str(tmp_path)])  # a part leaves the others' rows
    text = (tmp_path / "RESULTS.md").read_text()
    assert "## GAE" in text
    assert "## V-trace" in text


QUICKEST = ("storage", "minibatches", "ppo", "host")


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(name, marks=pytest.mark.slow if name in QUICKEST else pytest.mark.long)
        for name in SECTIONS
    ],
)
def test_every_section_runs(section, tmp_path):
    with jax.numpy_rank_promotion("allow"):  # peers need it
        assert main([section, "--quick", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["rows"]


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("num_actors", [1, 2])
def test_a_gradient_taken_by_chunks_is_the_gradient(reduction, num_actors):
    rows = 3 * learners.CHUNK_ROWS
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(num_actors, rows, 3)), jnp.float32)
    weights = jnp.asarray(rng.random((num_actors, rows)) < 0.7, jnp.float32)

    def loss(params, batch):
        x, w = batch
        errors = jnp.square(jnp.tanh(x @ params) - 1)
        return jnp.sum(w * errors), jnp.sum(w), {"errors": jnp.sum(w * errors)}

    params = jnp.asarray([0.1, -0.2, 0.3])
    whole, split = (
        learners.gradient(loss, params, (x, weights), reduction=reduction, split_rows=split_rows)
        for split_rows in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, split)


@pytest.mark.parametrize(
    ("rows", "chunk"), [(4096, 2048), (5120, 1280), (2048, None), (4093, None)]
)
def test_chunks_divide_the_rows(rows, chunk):
    assert learners.chunk_rows(rows) == chunk
