"""What a reader of logs and plots imports stays light."""

import subprocess
import sys

import pytest

HEAVY = {"jax", "flax", "matplotlib", "pandas", "tensorboardX", "IPython"}


def loaded_after(code):
    script = f"{code}\nimport sys\nprint(' '.join(m for m in sys.modules if '.' not in m))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "from jaxroll.train import Progress\nwith Progress(1, mode='silent') as p: p.update(1)",
        "from jaxroll.train import History, make_loggers\nrepr(History([{'step': 1}]))",
        "from jaxroll.train import plot_runs",
    ],
)
def test_nothing_heavy_is_imported_before_use(code):
    assert not loaded_after(code) & HEAVY


def test_plots_leave_pyplot_alone():
    code = (
        "from jaxroll.train import History\n"
        "History([{'step': 1, 'x': 2.0}]).plot('x')\n"
        "import sys; assert 'matplotlib.pyplot' not in sys.modules"
    )
    assert "matplotlib" in loaded_after(code)
