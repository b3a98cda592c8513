"""Whole episodes with the current params, between rows and after a run."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import collectors, parallel

# Folded into the run's key for evaluations: far from the numbers that `split` uses.
EVAL_FOLD = 2**30 + 1


def evaluation_columns(
    agent: Any, state: Any, seed: int, iteration: int, num_episodes: int, env: Any
) -> dict[str, Any]:
    """What an evaluation adds to a row; its episodes follow from the seed and the iteration."""

    def key(seed: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), EVAL_FOLD), iteration)

    members = getattr(agent, "seeds", None)
    keys = key(seed) if members is None else jax.vmap(key)(members)
    result = evaluate_with_key(agent, state, keys, num_episodes, True, env)
    return {
        "eval_episode_return": result["episode_return"],
        "eval_episode_length": result["episode_length"],
    }


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
    key = jax.random.fold_in(jax.random.key(seed), EVAL_FOLD)
    members = getattr(agent, "members", None)
    if members is not None:
        key = jnp.broadcast_to(key, (len(members),))
    return evaluate_with_key(agent, state, key, num_episodes, deterministic, env)


def evaluate_with_key(
    agent: Any, state: Any, key: jax.Array, num_episodes: int, deterministic: bool, env: Any
) -> dict[str, Any]:
    """Mean and each of the returns and lengths of `num_episodes` whole episodes.

    With a key for each member of a sweep, [N], so are the results.
    """
    env = agent.env if env is None else env
    params = parallel.local(agent.acting_params(state.shared))
    if agent.is_host:
        result = collectors.evaluate_host(
            env, agent.policy, params, key, num_episodes=num_episodes, deterministic=deterministic
        )
    else:
        play = _evaluate_members if key.ndim else _evaluate
        result = play(
            env, agent.policy, params, key, num_episodes=num_episodes, deterministic=deterministic
        )
    returns = np.asarray(result.episode_return)
    lengths = np.asarray(result.episode_length)
    return {
        "episode_return": returns.mean(-1).tolist(),
        "episode_return_std": returns.std(-1).tolist(),
        "episode_length": lengths.mean(-1).tolist(),
        "episode_returns": returns,
        "episode_lengths": lengths,
        "num_episodes": int(num_episodes),
    }


_evaluate = functools.partial(
    jax.jit, static_argnums=(0, 1), static_argnames=("num_episodes", "deterministic")
)(collectors.evaluate)


@functools.partial(
    jax.jit, static_argnums=(0, 1), static_argnames=("num_episodes", "deterministic")
)
def _evaluate_members(env: Any, policy: Any, params: Any, keys: Any, **options: Any) -> Any:
    return jax.vmap(lambda p, k: collectors.evaluate(env, policy, p, k, **options))(params, keys)
