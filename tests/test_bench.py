"""The benchmarks run, and say what they measured; never that anything is fast."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import harness  # noqa: E402
import launches  # noqa: E402
import run  # noqa: E402
from harness import Ratio, Row, Settings, Spread  # noqa: E402

pytestmark = pytest.mark.slow


def test_contenders_take_turns_in_changing_order():
    calls = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    ratios = [Ratio("a", "b"), Ratio("a", "absent")]
    row = harness.measure("s", "c", contenders, ratios, Settings(seconds=0, rounds=2))
    assert calls == ["a", "b", "a", "b", "a", "b", "b", "a"]
    assert row.rounds == 2
    assert [ratio.label for ratio, _ in row.ratios] == ["a / b"]


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


def test_a_row_is_the_same_after_json():
    row = Row("s", "c", rounds=3, steps=4, notes=["n"], temporary_bytes={"a": 1}, counts={"b": 2})
    row.times = {"a": Spread(1.0, 0.5, 2.0)}
    row.ratios = [(Ratio("a", "b, c", at_least=1.25, at_most=3), Spread(2.0, 1.0, 3.0))]
    assert Row.from_json(json.loads(json.dumps(row.as_json()))) == row


def test_repeated_calls_give_the_result_of_one():
    program = harness.repeated(lambda x: x * 2 + 1, jnp.arange(3.0))
    for count in (1, 5):
        tie, result = program(count)
        assert int(tie) == count
        np.testing.assert_array_equal(result, [1.0, 3.0, 5.0])


def test_contenders_that_disagree_are_an_error():
    functions = {"a": lambda x: x, "b": lambda x: x + 1}
    with pytest.raises(AssertionError, match="a and b differ"):
        harness.check_agreement(functions, (jnp.zeros(2),), ["a", "b"])


def test_instructions_of_a_loop_count_once_per_turn():
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)

    def looped(x, turns):
        return jax.lax.fori_loop(0, turns, lambda _, x: jnp.sin(x) @ jnp.ones((8, 8)), x)

    counts = [
        launches.count_launches(lambda x, n=n: looped(x, n), shape, platform="tpu")
        for n in (100, 200)
    ]
    assert counts[1] - counts[0] == pytest.approx(counts[0], rel=0.1)


def test_an_unknown_section_names_the_nearest(capsys):
    assert run.main(["vtraces"]) == 2
    assert "Did you mean 'vtrace'?" in capsys.readouterr().err


def test_it_runs_from_a_checkout_and_keeps_the_rows_of_other_sections(tmp_path):
    command = [sys.executable, BENCHMARKS / "run.py", "--quick", "--out", tmp_path]
    for section in ("gae", "vtrace"):
        done = subprocess.run([*command, section], capture_output=True, text=True, check=True)
        assert "jaxroll / roofline" in done.stdout
    data = json.loads((tmp_path / "results.json").read_text())
    assert {"jaxroll", "purejaxrl form", "roofline"} <= data["rows"][0]["times"].keys()
    assert data["command"] == "python examples/benchmarks/run.py vtrace --quick"
    text = (tmp_path / "RESULTS.md").read_text()
    assert "## GAE" in text
    assert "## V-trace" in text


QUICKEST = ("storage", "minibatches", "ppo", "host", "launches", "versions")


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(name, marks=() if name in QUICKEST else pytest.mark.long)
        for name in run.SECTIONS
    ],
)
def test_every_section_runs(section, tmp_path):
    checkout = BENCHMARKS.parents[1]
    options = ["--quick", "--out", str(tmp_path), "--baseline", str(checkout)]
    with jax.numpy_rank_promotion("allow"):  # peers need it
        assert run.main([section, *options]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert all(row["times"] or row["counts"] or row["notes"] for row in rows)
