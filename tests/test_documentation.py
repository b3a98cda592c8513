"""README and docs: every Python block runs, every command parses, every link leads somewhere."""

import json
import pathlib
import re
import shlex
import sys

import matplotlib.pyplot as plt
import pytest

import jaxroll
from jaxroll.cli import parse

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
CHEAP = ("truncation", "estimators", "storages")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


WITH_CODE = [
    pytest.param(page, marks=() if page.stem in CHEAP else pytest.mark.slow, id=page.stem)
    for page in PAGES
    if blocks(page, "python")
]


@pytest.fixture
def few_steps(monkeypatch):
    """Long trainings take two iterations; everything else is as it is written."""
    train = jaxroll.DistributedAgent.train

    def short(self, num_train_steps, **options):
        if num_train_steps > 10_000:
            num_train_steps = self.prefilled_steps + 2 * self.steps_per_iteration
        return train(self, num_train_steps, **options)

    monkeypatch.setattr(jaxroll.DistributedAgent, "train", short)


@pytest.mark.parametrize("page", WITH_CODE)
def test_every_block_runs(page, few_steps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name} block {number}", "exec"), names)
    plt.close("all")


def test_every_command_of_jaxroll_parses():
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.split("\n")]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line[:8] == "jaxroll "]
    assert len(commands) >= 10
    for command in commands:
        assert not isinstance(parse(command), int)


def test_every_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        for path in re.findall(
            r"`((?:examples|tests|notebooks|jaxroll)/[\w./]+)`", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_every_name_exists():
    pages = [page for page in PAGES if page.stem != "migration"]  # which has names of the past
    for page in pages:
        for name in re.findall(r"`(?:jaxroll\.)((?:\w+\.)*\w+)", page.read_text(encoding="utf-8")):
            found = jaxroll
            for part in name.split("."):
                assert hasattr(found, part), f"{page.name}: jaxroll.{name}"
                found = getattr(found, part)


def test_the_readme_is_short_and_names_every_page():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in text


def test_speed_in_the_readme_is_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    import report
    from harness import Row

    results = json.loads((ROOT / "examples" / "benchmarks" / "results.json").read_text())
    rows = [Row.from_json(row) for row in results["rows"]]
    assert report.summary(rows) in README.read_text(encoding="utf-8")
    for name in ("report", "harness"):
        sys.modules.pop(name)


def test_ci_runs_the_readmes_test_command():
    run = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in run
    command = re.search(r"<!-- test command -->\n```bash\n(.*?)```", README.read_text(), re.DOTALL)
    assert command is not None
    assert "pytest" in command.group(1)
