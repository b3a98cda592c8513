"""Whether an environment keeps its contract: shapes, dtypes, flags, NaN, determinism, resets."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import spaces
from jaxroll.checks import check_count, check_seed
from jaxroll.envs.actions import action_bounds
from jaxroll.envs.base import Env, HostEnv, HostEnvSpec, HostStep
from jaxroll.types import PyTree, TimeStep

MASK = "action_mask"


def check_env(env: Any, *, num_steps: int = 200, seed: int = 0) -> None:
    """Raise unless an environment keeps its contract; warn of observations outside their space.

    Runs do the part that is cheap by themselves: what can be traced of a JAX environment, and the
    first reset and step of host environments.

    Args:
      env: whatever `jaxroll.envs.as_env` takes. Host environments are opened here, two of them,
        and closed; open ones are reset and stay open.
      num_steps: random actions to play; 0: trace only, which tells of shapes and dtypes.
      seed: of resets and actions.

    Example:
      >>> import jaxroll
      >>> check_env(jaxroll.make_env("CartPole-v1"), num_steps=20)
    """
    from jaxroll.envs.make import as_env

    env, num_steps = as_env(env), check_count("num_steps", num_steps, at_least=0)
    seed = check_seed("seed", seed)
    if isinstance(env, HostEnvSpec):
        with env.make(2) as first, env.make(2) as second:
            _check_host_env(first, second, num_steps, seed)
    elif isinstance(env, HostEnv):
        _check_host_env(env, env, num_steps, seed)
    else:
        check_shapes(env)
        if num_steps:
            _check_values(env, num_steps, seed)


# JAX environments.


@functools.lru_cache(maxsize=256)
def check_shapes(env: Env) -> None:
    """Raise unless shapes and dtypes of a JAX environment are right; traced once, not run."""
    name = type(env).__name__
    for which in ("observation_space", "action_space"):
        if not isinstance(getattr(env, which), spaces.Space):
            raise TypeError(
                f"{which} of {name} must be a space of jaxroll.spaces, got {getattr(env, which)!r}."
            )
    returned: list[Any] = []

    def reset_and_step(key: jax.Array) -> tuple:
        reset = env.reset(key)
        if not (isinstance(reset, tuple) and len(reset) == 2):
            raise TypeError(f"reset of {name} must return (state, obs), got {_count(reset)}.")
        action = jax.tree.map(jnp.asarray, spaces.zeros(env.action_space))
        out = env.step(key, reset[0], action)
        returned.append(out)
        return (reset, out) if _is_right(out) else ()

    shapes = jax.eval_shape(reset_and_step, jax.eval_shape(lambda: jax.random.key(0)))
    if not shapes:
        raise TypeError(
            f"step of {name} must return (state, TimeStep), got {_count(returned[0])}. If it stops "
            "at the end of an episode, use jaxroll.envs.autoreset(env)."
        )
    (state, obs), (after, step) = shapes
    check_observation(env.observation_space, obs, f"obs of {name}.reset")
    check_observation(env.observation_space, step.obs, f"obs of {name}.step")
    check_observation(env.observation_space, step.final_obs, f"final_obs of {name}.step")
    _check_same(state, after, f"the state of {name}")
    for field, kinds, wanted in (
        ("reward", "fV", "a float"),
        ("terminated", "b", "a bool"),
        ("truncated", "b", "a bool"),
    ):
        value = getattr(step, field)
        if value.shape != () or np.dtype(value.dtype).kind not in kinds:
            raise TypeError(
                f"{field} of {name}.step must be {wanted} of shape (), got "
                f"{value.dtype}{list(value.shape)}."
            )


def _is_right(out: Any) -> bool:
    return isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], TimeStep)


def _count(out: Any) -> str:
    return f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__


def check_observation(
    space: spaces.Space, obs: PyTree, name: str, batch_shape: tuple[int, ...] = ()
) -> None:
    """Raise unless an observation has the keys, shapes and kinds of dtype of its space."""
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, dict) or obs.keys() != space.spaces.keys():
            got = sorted(obs) if isinstance(obs, dict) else type(obs).__name__
            raise TypeError(
                f"{name} must be a dict with the keys {sorted(space.spaces)} of the "
                f"observation_space, got {got}."
            )
        for key, part in space.items:
            check_observation(part, obs[key], f"{name}[{key!r}]", batch_shape)
        return
    shape, dtype = (*batch_shape, *space.shape), np.dtype(space.dtype)
    # Sizes of dtypes may differ (float64 with JAX_ENABLE_X64), and counts may be of any kind.
    kinds = {"f": "fV", "V": "fV"}.get(dtype.kind, dtype.kind)
    kinds = kinds if isinstance(space, spaces.Box) else "iub"
    got = getattr(obs, "shape", None), getattr(obs, "dtype", type(obs).__name__)
    if got[0] != shape or np.dtype(got[1]).kind not in kinds:
        what = f"{got[1]}{list(got[0])}" if got[0] is not None else got[1]
        raise TypeError(
            f"{name} must be {dtype}{list(shape)} as the observation_space says, got {what}."
        )


def _check_same(before: PyTree, after: PyTree, name: str) -> None:
    """Raise unless a step returns a state like the one that it was given."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TypeError(
            f"{name} must have the same structure after reset and after step, got "
            f"{jax.tree.structure(before)} and {jax.tree.structure(after)}."
        )
    for (path, x), y in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} must be the same after reset and after step, "
                f"got {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}."
            )


def _check_values(env: Env, num_steps: int, seed: int) -> None:
    """Play random actions twice."""
    reset, steps = _play(env, num_steps, seed)
    steps, name = jax.tree.map(np.asarray, steps), type(env).__name__
    _check_finite(reset, np.zeros(0), f"reset of {name}")
    _check_finite((steps.obs, steps.final_obs), steps.reward, f"step of {name}")
    _check_equal((reset, steps), _play(env, num_steps, seed), name)
    starts = jax.vmap(lambda key: env.reset(key)[1])(jax.random.split(jax.random.key(seed), 64))
    for t in np.flatnonzero(steps.terminated | steps.truncated):
        obs, final = (jax.tree.map(lambda x, t=t: x[t], x) for x in (steps.obs, steps.final_obs))
        if _same(obs, final) and not _is_among(obs, starts):
            raise ValueError(
                f"{name} ended its episode at step {t} of random actions, but obs is "
                "still the last observation and not the first of a new episode. Reset in step, or "
                "use jaxroll.envs.autoreset(env)."
            )
    _check_inside(env.observation_space, (reset, steps.obs, steps.final_obs), name)


def _play(env: Env, num_steps: int, seed: int) -> tuple[PyTree, TimeStep]:
    """(first observation, time steps [T, ...]); traced anew each time, to see what tracing adds."""

    def step(carry: tuple, key: jax.Array) -> tuple:
        state, obs = carry
        action_key, step_key = jax.random.split(key)
        state, step = env.step(step_key, state, _random_action(env.action_space, obs, action_key))
        return (state, step.obs), step.replace(info={})

    def play(key: jax.Array) -> tuple:
        reset_key, steps_key = jax.random.split(key)
        start = env.reset(reset_key)
        _, steps = jax.lax.scan(step, start, jax.random.split(steps_key, num_steps))
        return start[1], steps

    return jax.jit(play)(jax.random.key(seed))


def _random_action(space: spaces.Space, obs: PyTree, key: jax.Array) -> PyTree:
    mask = obs.get(MASK) if isinstance(obs, dict) else None
    if mask is None or not isinstance(space, spaces.Discrete):
        return space.sample(key)
    logits = jnp.where(jnp.asarray(mask, bool), 0.0, -jnp.inf)
    return jax.random.categorical(key, logits).astype(space.dtype)


# Host environments.


def check_host_step(envs: HostEnv, step: HostStep) -> None:
    """Raise unless shapes, dtypes and values of one step of B host environments are right."""
    name, batch = type(envs).__name__, (envs.num_envs,)
    check_observation(envs.observation_space, step.obs, f"obs of {name}", batch)
    if step.final_obs is not None:
        check_observation(envs.observation_space, step.final_obs, f"final_obs of {name}", batch)
    dtypes = {"reward": np.float32} | dict.fromkeys(
        ("terminated", "truncated", "valid", "is_first"), bool
    )
    for field, dtype in dtypes.items():
        value = np.asarray(getattr(step, field))
        if value.shape != batch or value.dtype != dtype:
            raise TypeError(
                f"{field} of {name} must be {np.dtype(dtype)}{list(batch)}, got "
                f"{value.dtype}{list(value.shape)}."
            )
    done = step.terminated | step.truncated
    if not envs.resets_on_next_step and done.any() and step.final_obs is None:
        raise ValueError(f"{name} resets on the same step, so it must hand over final_obs at ends.")
    _check_finite(step.obs, step.reward, f"step of {name}")


def check_host_reset(envs: HostEnv, obs: PyTree) -> None:
    """Raise unless the first observations of B host environments are right."""
    name = f"reset of {type(envs).__name__}"
    check_observation(envs.observation_space, obs, f"obs of {name}", (envs.num_envs,))
    _check_finite(obs, np.zeros(0), name)


def _check_host_env(first: HostEnv, second: HostEnv, num_steps: int, seed: int) -> None:
    """Play random actions in one, then the same in the other."""
    name = type(first).__name__
    played: list[PyTree] = []
    for envs in (first, second):
        rng = np.random.default_rng(seed)
        obs = envs.reset(seed)
        check_host_reset(envs, obs)
        _check_inside(envs.observation_space, (obs,), name)
        trace = [jax.tree.map(np.array, obs)]
        ended = np.zeros(envs.num_envs, bool)
        for _ in range(num_steps):
            step = envs.step(_random_host_actions(envs.action_space, obs, rng, envs.num_envs))
            check_host_step(envs, step)
            _check_inside(envs.observation_space, (step.obs,), name)
            done = step.terminated | step.truncated
            begins = ended if envs.resets_on_next_step else done
            if (step.is_first != begins).any() or (step.valid == (ended & begins)).any():
                raise ValueError(
                    f"{name} must begin an episode where the last one ended (is_first), and mark "
                    "the rows that only reset (valid)."
                )
            ended = done if envs.resets_on_next_step else np.zeros_like(done)
            obs = step.obs
            trace.append(jax.tree.map(np.array, step._replace(final_obs=None)))
        played.append(trace)
    _check_equal(played[0], played[1], name)


def _random_host_actions(space: Any, obs: PyTree, rng: Any, num_envs: int) -> PyTree:
    if isinstance(space, spaces.Dict):
        return {k: _random_host_actions(part, (), rng, num_envs) for k, part in space.items}
    shape = (num_envs, *space.shape)
    if np.dtype(space.dtype).kind == "f":
        low, high = space.bounds() if space.is_bounded else (-1.0, 1.0)
        return rng.uniform(low, high, shape).astype(space.dtype)
    mask = obs.get(MASK) if isinstance(obs, dict) else None
    if mask is not None and isinstance(space, spaces.Discrete):
        return np.array([rng.choice(np.flatnonzero(row)) for row in mask], space.dtype)
    low, high = action_bounds(space)
    return rng.integers(low, high, shape, endpoint=True).astype(space.dtype)


# Both.


def _check_finite(obs: PyTree, reward: np.ndarray, name: str) -> None:
    for path, leaf in jax.tree.leaves_with_path(obs):
        leaf = np.asarray(leaf)
        where = jax.tree_util.keystr(path)
        if leaf.dtype.kind in "fV" and not np.isfinite(leaf.astype(np.float32)).all():
            raise ValueError(f"{name} gave an observation{where} that is NaN or infinite.")
        if where.endswith(f"['{MASK}']") and not leaf.any(-1).all():
            raise ValueError(
                f"{name} gave an {MASK} that forbids every action: no policy can act then."
            )
    if not np.isfinite(reward).all():
        raise ValueError(f"{name} gave a reward that is NaN or infinite.")


def _check_inside(space: spaces.Space, observations: tuple, name: str) -> None:
    if not all(space.contains(jax.tree.map(np.asarray, obs)) for obs in observations):
        warnings.warn(
            f"{name} shows observations outside of its observation_space, {space}.", stacklevel=3
        )


def _check_equal(one: PyTree, other: PyTree, name: str) -> None:
    if not _same(one, other):
        raise ValueError(
            f"{name} is not deterministic: the same seed and actions gave other observations, "
            "rewards or ends. Draw everything random from the key, or from the seed of reset."
        )


def _same(one: PyTree, other: PyTree) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in leaves)


def _is_among(obs: PyTree, starts: PyTree) -> bool:
    """Whether an observation is one of the first observations [N, ...]."""
    equal = [
        (np.asarray(all) == np.asarray(one)).reshape(len(all), -1).all(-1)
        for one, all in zip(jax.tree.leaves(obs), jax.tree.leaves(starts))
    ]
    return bool(np.all(equal, axis=0).any()) if equal else True
