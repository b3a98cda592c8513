"""Every example runs, with a small budget, and says what it promises to say."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# Script → steps and what its output must hold.
BUDGETS = {
    "callbacks": (4096, "stopped by steps"),
    "checkpoints": (4096, "the policy as a file"),
    "continuous_control": (4096, "return over 100 episodes"),
    "host_environment": (2048, "return over 32 episodes"),
    "own_environment": (4096, "return"),
    "own_loop": (4096, "steps per episode"),
    "own_policy": (4096, "return over 32 episodes"),
    "own_storage": (4096, "return over 32 episodes"),
    "ppo_cartpole": (4096, "stopped by steps"),
    "recurrent_memory": (4096, "return over 100 episodes"),
    "reinforce": (4096, "return over 100 episodes"),
    "sweep": (2048, "learning rate 0.01, seed 2"),
    "trainer": (4096, "return over 32 episodes"),
    "two_streams": (16, "intrinsic"),
}
LIGHT = ("two_streams",)


def run(name, steps, monkeypatch, *more):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", str(steps), *more])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(
    "name",
    [name if name in LIGHT else pytest.param(name, marks=pytest.mark.slow) for name in BUDGETS],
)
def test_example_runs_and_reports(name, monkeypatch, capsys):
    steps, words = BUDGETS[name]
    run(name, steps, monkeypatch)
    assert words in capsys.readouterr().out


@pytest.mark.slow
def test_impala_learns_the_same_on_one_device_and_on_several():
    command = [sys.executable, EXAMPLES / "impala_devices.py", "--steps", "4096", "--devices", "4"]
    # In a process of its own: it asks for devices before the first use of one.
    result = subprocess.run(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    words, _, number = result.stdout.strip().rpartition(": ")
    assert words.endswith("largest difference between the params")
    assert float(number) == 0  # bit by bit


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo_cartpole", "sweep"])
def test_example_draws_its_curves(name, monkeypatch, tmp_path):
    file = tmp_path / "curves.png"
    run(name, 4096, monkeypatch, "--out", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_one_of_several_hosts_trains_alone(monkeypatch, tmp_path):
    run("several_hosts", 8192, monkeypatch, "--out", str(tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_no_example_goes_untested():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts <= {*BUDGETS, "impala_devices", "several_hosts"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_tells_how_to_run_it(path):
    text = path.read_text(encoding="utf-8")
    assert f"python examples/{path.name}" in text.split('"""')[1]
