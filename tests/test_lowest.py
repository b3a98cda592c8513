"""The lowest versions that pyproject.toml allows: they train, save, resume and export."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
EXTRAS = ("gymnasium", "export", "tensorboard")
PROGRAM = """
import sys
import jax, numpy as np
import jaxroll

def make(env, **more):
    return jaxroll.PPO.create(env, num_envs=4, num_steps=8, hidden_sizes=(8,), **more)

def leaves(state):
    keys = jax.dtypes.prng_key
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, keys)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(state)]

run, quiet = sys.argv[1] + "/run", {"progress": "silent"}
whole, _ = make("CartPole-v1").train(128, **quiet)
make("CartPole-v1").train(64, checkpoint_dir=run, loggers=["tensorboard"], **quiet)
agent = make("CartPole-v1")
resumed, _ = agent.train(128, checkpoint_dir=run, resume=True, loggers=["tensorboard"], **quiet)
for a, b in zip(leaves(whole), leaves(resumed), strict=True):
    np.testing.assert_array_equal(a, b)
assert np.isfinite(agent.eval(agent.load(run), 2)["episode_return"])
jaxroll.export_policy(agent, resumed, sys.argv[1] + "/policy")
make("gymnasium:CartPole-v1").train(64, **quiet)
jaxroll.IMPALA.create(
    "CartPole-v1", network="lstm", num_envs=4, num_steps=5, num_storages=8, batch_size=4
).train(80, **quiet)
print("done")
"""


def lowest_versions():
    """Requirements of the package and of some extras, each at its bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement) for requirement in wanted]
    assert all(found), "every requirement is a name and a lower bound"
    return [f"{match[1]}=={match[2]}" for match in found]


@pytest.mark.slow
def test_the_lowest_versions_train_resume_and_export(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([*pip, "six"], check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("no package index can be reached")
    done = subprocess.run([*pip, *lowest_versions()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    # Programs of other versions do not belong into the tests' cache.
    environment = {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-c", PROGRAM, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]
