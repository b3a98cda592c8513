"""Whole episodes with the current params, between rows and after a run."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxroll import collectors, parallel
from jaxroll.agents.states import check_state
from jaxroll.checks import check_count, check_flag, check_seed
from jaxroll.envs.base import HostEnv, HostEnvSpec
from jaxroll.train.preflight import as_eval_env

# Folded into the run's key for evaluations: far from the numbers that `split` uses.
EVAL_FOLD = 2**30 + 1


class NonFiniteError(FloatingPointError):
    """A loss, a gradient or the params were not finite; such a gradient is never applied."""


def evaluate(
    agent: Any,
    state: Any,
    num_episodes: int,
    *,
    seed: int = 0,
    deterministic: bool = True,
    env: Any = None,
) -> dict[str, Any]:
    """Play whole episodes; see `DistributedAgent.eval`."""
    check_state(state)
    num_episodes = check_count("num_episodes", num_episodes)
    check_flag("deterministic", deterministic)
    env = as_eval_env(agent, env, "env")
    key = jax.random.fold_in(jax.random.key(check_seed("seed", seed)), EVAL_FOLD)
    members = getattr(agent, "members", None)
    if members is not None:
        key = jnp.broadcast_to(key, (len(members),))
    return _play(agent, state, key, num_episodes, deterministic, env)


def evaluation_columns(
    agent: Any, state: Any, seed: int, iteration: int, num_episodes: int, env: Any, spread: bool
) -> dict[str, Any]:
    """What an evaluation adds to a row; its episodes follow from the seed and the iteration.

    With `spread` they are played on all devices of the state that this process has.
    """

    def key(seed: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), EVAL_FOLD), iteration)

    members = getattr(agent, "seeds", None)
    keys = key(seed) if members is None else jax.vmap(key)(members)
    result = _play(agent, state, keys, num_episodes, True, env, spread)
    names = ("episode_return", "episode_length", "num_unfinished")
    return {f"eval_{name}": result[name] for name in names}


def _play(
    agent: Any,
    state: Any,
    key: jax.Array,
    num_episodes: int,
    deterministic: bool,
    env: Any,
    spread: bool = False,
) -> dict[str, Any]:
    """Means and each of the returns and lengths; a key for each member, [N], gives [N] of them.

    The return of an episode that did not end is NaN, and the means are without it.
    """
    env = agent.env if env is None else env
    acting = agent.acting_params(state.learner)
    params = parallel.local(acting)
    is_finite = np.asarray(_finite(params, key.ndim))
    if not is_finite.any():
        raise NonFiniteError(
            "the params are not finite, so that their episodes would say nothing. Load an earlier "
            "checkpoint."
        )
    options = {"num_episodes": num_episodes, "deterministic": deterministic}
    if isinstance(env, HostEnv | HostEnvSpec):
        result = _evaluate_on_host(env, agent.policy, params, key, **options)
    elif key.ndim:
        result = _evaluate_members(env, agent.policy, params, key, **options)
    else:
        mesh = parallel.local_mesh(acting) if spread else None
        if mesh is not None:
            params, key = parallel.place((params, key), mesh, PartitionSpec())
        result = collectors.evaluate(env, agent.policy, params, key, **options, mesh=mesh)
    is_complete = np.asarray(result.is_complete)
    if not is_complete.all():
        warnings.warn(
            f"{is_complete.size - is_complete.sum()} of {is_complete.size} episodes did not end, "
            "or never began behind one that did not; the means are without them. Give the "
            "environment a time limit.",
            stacklevel=3,
        )
    if not is_finite.all():
        bad = np.flatnonzero(~is_finite).tolist()
        warnings.warn(f"the params of members {bad} are not finite: no returns.", stacklevel=3)
        is_complete = is_complete & is_finite[:, None]
    returns = np.where(is_complete, np.asarray(result.episode_return), np.float32(np.nan))
    lengths = np.asarray(result.episode_length)
    return {
        **episode_means(returns, lengths, is_complete),
        "episode_returns": returns,
        "episode_lengths": lengths,
        "is_complete": is_complete,
        "num_episodes": num_episodes,
    }


@functools.partial(jax.jit, static_argnums=1)
def _finite(params: Any, num_axes: int) -> Any:
    """Whether all numbers are finite; with a first axis of members, for each of them."""
    numbers = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = [jnp.isfinite(x).all(tuple(range(num_axes, x.ndim))) for x in numbers]
    return functools.reduce(jnp.logical_and, finite, True)


def episode_means(returns: Any, lengths: Any, is_complete: Any) -> dict[str, Any]:
    """Over the complete episodes of the last axis; NaN where there is none."""
    returns, lengths = (np.ma.array(x, float, mask=~is_complete) for x in (returns, lengths))
    means = {
        "episode_return": returns.mean(-1),
        "episode_return_std": returns.std(-1),
        "episode_length": lengths.mean(-1),
    }
    means = {name: np.ma.filled(x, np.nan).tolist() for name, x in means.items()}
    return {**means, "num_unfinished": (~is_complete).sum(-1).tolist()}


@functools.partial(
    jax.jit, static_argnums=(0, 1), static_argnames=("num_episodes", "deterministic")
)
def _evaluate_members(env: Any, policy: Any, params: Any, keys: Any, **options: Any) -> Any:
    return jax.vmap(lambda p, k: collectors.evaluate(env, policy, p, k, **options))(params, keys)


def _evaluate_on_host(env: Any, policy: Any, params: Any, key: Any, **options: Any) -> Any:
    """One set of params, or one member after the other."""
    if not key.ndim:
        return collectors.evaluate_host(env, policy, params, key, **options)
    members = [jax.tree.map(lambda x, i=i: x[i], (params, key)) for i in range(len(key))]
    results = [collectors.evaluate_host(env, policy, *member, **options) for member in members]
    return jax.tree.map(lambda *x: np.stack(x), *results)
