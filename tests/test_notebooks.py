"""The notebooks run from top to bottom, and what is committed of them is fit to be read."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# Put behind the cell tagged "parameters": enough to run every line, too little to learn.
BUDGET = "num_train_steps = 12_000\nnum_updates = 8"


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return read(request.param)


def test_there_are_seven_in_order():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"0{i}_" for i in range(1, 8)]


def test_it_is_short_and_starts_with_its_title(notebook):
    assert len(notebook.cells) <= 15
    assert notebook.cells[0].source.startswith("# ")
    nbformat.validate(notebook)


def test_committed_outputs_come_from_one_run_without_errors(notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    kinds = {output.output_type for output in outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_committed_outputs_tell_nothing_of_the_machine(notebook):
    text = nbformat.writes(notebook)
    for trace in ("/home/", "/root/", "/tmp/", "/usr/", "site-packages", "object at 0x", "widget"):
        assert trace not in text
    assert len(text) < 600_000


def test_it_has_one_cell_for_the_budget(notebook):
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1


# Recurrence, eight CPU devices and many small programs compile for minutes.
RUNS = [
    pytest.param(path, marks=pytest.mark.long)
    if path.name[:2] in ("03", "04", "05", "07")
    else path
    for path in NOTEBOOKS
]


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = read(path)
    for i, cell in enumerate(notebook.cells):
        if "parameters" in cell.metadata.get("tags", []):
            notebook.cells.insert(i + 1, nbformat.v4.new_code_cell(BUDGET))
            break
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(path.parent.parent))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own, which shows figures
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=resources
    )
    client.execute()  # an error in a cell raises
    committed, now = code_cells(read(path)), code_cells(notebook)
    now = [cell for cell in now if cell.source != BUDGET]
    for before, after in zip(committed, now, strict=True):
        shown = [_kinds(cell.outputs) for cell in (before, after)]
        assert shown[0] == shown[1], before.source


def _kinds(outputs):
    """Which kinds of output a cell has; numbers and times differ with the budget."""
    return {
        kind
        for output in outputs
        if output.get("name") != "stderr"
        for kind in output.get("data", {output.get("name"): None})
    }
