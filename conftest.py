"""Eight CPU devices, set before the backend starts; strict shapes; the tiers of tests.

Compiled programs are kept in `.pytest_cache`, so that the workers and the processes that tests
start share them, and a second run need not compile again. Plain tests run by default; `--slow`
adds the slow tier, `--long` the long one.

Hypothesis tries the same examples in each run; with `--long` others each time.

Most of the time goes into compiling. Doctests, and the files in `UNOPTIMIZED`, compile without
most of XLA's optimisations: they test neither bits, nor memory, nor speed.
"""

import os
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".pytest_cache" / "programs")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

UNOPTIMIZED = (
    "tests/agents/test_agents_losses.py",
    "tests/agents/test_agents_pure.py",
    "tests/agents/test_agents_values.py",
    "tests/collectors/test_evaluation.py",
)


def pytest_addoption(parser):
    """Options that add a tier."""
    parser.addoption("--slow", action="store_true", help="also run the slow tier")
    parser.addoption("--long", action="store_true", help="also run the long tier")


def pytest_configure(config):
    """A change makes a test fail, not the luck of a run."""
    hypothesis.settings.register_profile("same", derandomize=True)
    if not config.getoption("--long"):
        hypothesis.settings.load_profile("same")


def pytest_collection_modifyitems(config, items):
    """Skip the tiers that were not asked for."""
    for tier in ("slow", "long"):
        if not config.getoption(f"--{tier}"):
            skip = pytest.mark.skip(reason=f"tier {tier}: add --{tier}")
            for item in items:
                if tier in item.keywords:
                    item.add_marker(skip)


def pytest_ignore_collect(collection_path):
    """Helper modules and scripts beside the tests are no tests, and no doctests."""
    inside = "tests" in collection_path.parts and collection_path.suffix == ".py"
    return True if inside and not collection_path.name.startswith("test_") else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Choose how programs are compiled; none that was compiled without optimisations stays."""
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    wanted = file in UNOPTIMIZED or file.startswith("jaxroll/")
    if wanted != jax.config.read("jax_disable_most_optimizations"):
        jax.config.update("jax_disable_most_optimizations", wanted)
        if not wanted:
            jax.clear_caches()
