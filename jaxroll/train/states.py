"""States and params on disk, outside of a run's own checkpoints."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxroll.agents.states import check_state
from jaxroll.checks import check_flag, check_path
from jaxroll.train import step_files
from jaxroll.train.checkpoint import Checkpointer
from jaxroll.train.programs import make_program
from jaxroll.train.step_files import MANIFEST, TAGS, NoCheckpointError, find
from jaxroll.types import PyTree

BEST_KEY = "eval_episode_return"  # what says how good a checkpoint is


def describe(agent: Any) -> dict[str, Any]:
    """The agent's name, environment and hyperparameters, as JSON can hold them."""
    values = {name: getattr(agent, name) for name in agent.hyperparameters()}
    for name, value in values.items():
        if isinstance(value, np.generic | np.ndarray | jax.Array):
            value = np.asarray(value).tolist()
        is_infinite = isinstance(value, float) and math.isinf(value)
        values[name] = None if is_infinite else list(value) if isinstance(value, tuple) else value
    _, options = getattr(agent.env, "arguments", None) or ("", {})
    plain = bool | int | float | str | None
    return {
        "agent": agent.name,
        "env": agent.env_name,
        "env_options": {k: v if isinstance(v, plain) else repr(v) for k, v in options.items()},
        "hyperparameters": values,
    }


def save(agent: Any, state: Any, path: str | Path, *, overwrite: bool = False) -> None:
    """Write a state to a directory of its own, verified when it is loaded."""
    check_state(state)
    save_pytree(path, {"state": state}, describe(agent), overwrite=overwrite)


def load(agent: Any, path: str | Path) -> Any:
    """The state that `save`, or a run, wrote; another architecture is an error that says where."""
    source = _checkpoints_in(check_path("path", path))
    if agent.is_host:
        with contextlib.closing(make_program(agent, None, "fast")) as program:
            like = program.init(0)
    else:
        like = jax.eval_shape(agent.init, jax.random.key(0))
    return load_pytree(source, like, subtree="state")[0]


def best_checkpoint(directory: str | Path) -> Path:
    """The directory of a run's best checkpoint, for `load`."""
    steps = _checkpoints_in(directory)
    best = Checkpointer(steps, best_key=BEST_KEY).best_step()
    if best is None:
        raise NoCheckpointError(
            f"{directory} holds no checkpoint that was evaluated, so none is the best. Train with "
            "eval_interval and keep_best=1."
        )
    return steps / f"{best:010d}"


def _checkpoints_in(path: str | Path) -> Path:
    """A run directory's checkpoints, or the path itself."""
    steps = Path(path) / "checkpoints"
    return steps if steps.is_dir() else Path(path)


def policy_of(agent: Any, path: str | Path) -> dict[str, Any]:
    """`params` and `obs_statistics` in a run or a saved state; read before anything is compiled."""
    if not Path(path).exists():
        raise FileNotFoundError(
            f"init_model_path = {path} does not exist. Give a run's directory, or what save wrote."
        )
    key = jax.eval_shape(lambda: jax.random.key(0))
    init = agent.init_learner if agent.is_host else lambda key: agent.init(key).learner
    like = jax.eval_shape(init, key)
    source = _checkpoints_in(path)
    params, saved = load_pytree(source, like.params, subtree="state/learner/params")
    normalizes = like.obs_statistics is not None
    was = saved.get("hyperparameters", {}).get("normalize_observations", normalizes)
    if was != normalizes:
        raise ValueError(
            f"the policy of init_model_path = {path} was trained with normalize_observations="
            f"{was}, so it would see other observations with {normalizes}. Create the agent with "
            f"normalize_observations={was}."
        )
    if not normalizes:
        return {"params": params}
    statistics, _ = load_pytree(source, like.obs_statistics, subtree="state/learner/obs_statistics")
    return {"params": params, "obs_statistics": statistics}


def save_pytree(
    path: str | os.PathLike[str],
    tree: PyTree,
    metadata: dict[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a tree of arrays and its metadata to a new directory; back when it is on the disk.

    Args:
      path: must not exist, unless `overwrite`; the old one goes when the new one is complete.
      tree: any pytree of arrays, typed keys and Python numbers.
      metadata: what JSON can hold; `load_pytree` gives it back.

    Example:
      >>> import tempfile, numpy as np
      >>> path = tempfile.mkdtemp() + "/params"
      >>> save_pytree(path, {"w": np.arange(3)}, {"network": "mlp"})
      >>> load_pytree(path, {"w": np.zeros(3, int)})
      ({'w': array([0, 1, 2])}, {'network': 'mlp'})
    """
    path, tag = check_path("path", path), next(TAGS)
    check_flag("overwrite", overwrite)

    def check() -> None:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists. Choose another path, or pass overwrite=True.")
        if path.exists() and not (path / MANIFEST).is_file():
            raise FileExistsError(f"{path} is no checkpoint, so it is not overwritten. Remove it.")

    step_files.together(f"{tag}/check", check, primary_only=True)
    snapshot = step_files.take_snapshot(tree, {} if metadata is None else metadata)
    step_files.write_step(path, snapshot, tag)


def load_pytree(
    path: str | os.PathLike[str], like: PyTree, *, subtree: str = "", shardings: PyTree = None
) -> tuple[PyTree, dict[str, Any]]:
    """The tree and the metadata at a path, verified; a mismatch names leaves and shapes.

    Args:
      path: a directory of `save_pytree`, one step of a run, or a run's checkpoint directory
        (its newest intact step is taken).
      like: a tree of the same structure, of arrays or `jax.ShapeDtypeStruct`s.
      subtree: take only what is saved below this path, for instance "state/learner/params".
      shardings: where leaves go; see `Checkpointer.restore`.

    Returns:
      the tree, and the metadata (of a run's step: its config).
    """
    path = find(check_path("path", path))
    if not (path / MANIFEST).is_file() and (run := Checkpointer(path)).numbers():
        restored = run.restore(like, subtree=subtree, shardings=shardings)
        return restored.state, restored.metadata["config"]
    step_files.together(next(TAGS), lambda: step_files.verify(path), primary_only=True)
    tree, body = step_files.read(path, like, subtree=subtree, shardings=shardings)
    return tree, body["config"]
