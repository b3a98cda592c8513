"""The README's Python runs as it stands, block after block."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_readme_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README block {number}", "exec"), names)
    assert names["returns"].shape == (2, 16, 8)
    assert int(names["state"].learner.iteration) == 3


def test_ci_runs_the_readmes_test_command():
    run = (README.parent / ".ci" / "run").read_text()
    assert "README.md" in run
    command = re.search(r"<!-- test command -->\n```bash\n(.*?)```", README.read_text(), re.DOTALL)
    assert command is not None
    assert "pytest" in command.group(1)
