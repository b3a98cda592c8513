"""Names load when they are used."""

import subprocess
import sys

import pytest

import jaxroll.reporting as reporting

HEAVY = {"jax", "flax", "matplotlib", "rich", "pandas", "tensorboardX", "IPython"}


def loaded_after(code):
    script = f"{code}\nimport sys\nprint(' '.join(m for m in sys.modules if '.' not in m))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import jaxroll.reporting",
        "from jaxroll.reporting import Progress\nwith Progress(1, mode='silent') as p: p.update(1)",
        "from jaxroll.reporting import History, make_loggers\nrepr(History([{'step': 1}]))",
        "from jaxroll.reporting import plot_runs",
    ],
)
def test_nothing_heavy_is_imported_before_use(code):
    assert not loaded_after(code) & HEAVY


def test_progress_needs_not_even_numpy():
    assert "numpy" not in loaded_after("import jaxroll.reporting.progress")


def test_plots_leave_pyplot_alone():
    code = (
        "from jaxroll.reporting import History\n"
        "History([{'step': 1, 'x': 2.0}]).plot('x')\n"
        "import sys; assert 'matplotlib.pyplot' not in sys.modules"
    )
    assert "matplotlib" in loaded_after(code)


def test_every_public_name_is_there():
    for name in reporting.__all__:
        assert getattr(reporting, name) is not None
    assert dir(reporting) == sorted(reporting.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        reporting.nothing  # noqa: B018
