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
from jaxroll.envs.base import MASK, Env, HostEnv, HostEnvSpec, HostStep, common_dtypes, describe
from jaxroll.types import PyTree, TimeStep


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

    def reset_and_step() -> tuple:
        key = jax.random.key(0)
        reset = env.reset(key)
        if not (isinstance(reset, tuple) and len(reset) == 2):
            raise TypeError(f"reset of {name} must return (state, obs), got {describe(reset)}.")
        action = jax.tree.map(jnp.asarray, spaces.zeros(env.action_space))
        out = env.step(key, reset[0], action)
        returned.append(out)
        is_right = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], TimeStep)
        return (reset, out) if is_right else ()

    shapes = jax.eval_shape(reset_and_step)
    if not shapes:
        raise TypeError(
            f"step of {name} must return (state, TimeStep), got {describe(returned[0])}. If it "
            "stops at the end of an episode, use jaxroll.envs.autoreset(env)."
        )
    (state, obs), (after, step) = shapes
    check_observation(env.observation_space, obs, f"obs of {name}.reset")
    check_observation(env.observation_space, step.obs, f"obs of {name}.step")
    check_observation(env.observation_space, step.final_obs, f"final_obs of {name}.step")
    common_dtypes(state, after, f"state of {name}", can_widen=False)
    for field in ("reward", "terminated", "truncated"):
        value = getattr(step, field)
        kinds, wanted = ("fV", "a float") if field == "reward" else ("b", "a bool")
        if value.shape != () or np.dtype(value.dtype).kind not in kinds:
            raise TypeError(
                f"{field} of {name}.step must be {wanted} of shape (), got "
                f"{value.dtype}{list(value.shape)}."
            )


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
    kinds = "fV" if dtype.kind in "fV" else dtype.kind
    kinds = kinds if isinstance(space, spaces.Box) else "iub"
    if not hasattr(obs, "dtype") or obs.shape != shape or np.dtype(obs.dtype).kind not in kinds:
        got = f"{obs.dtype}{list(obs.shape)}" if hasattr(obs, "dtype") else type(obs).__name__
        raise TypeError(
            f"{name} must be {dtype}{list(shape)} as the observation_space says, got {got}."
        )


def _check_values(env: Env, num_steps: int, seed: int) -> None:
    """Play random actions twice."""
    reset, steps = _play(env, num_steps, seed)
    steps, name = jax.tree.map(np.asarray, steps), type(env).__name__
    _check_finite(reset, 0.0, f"reset of {name}")
    _check_finite((steps.obs, steps.final_obs), steps.reward, f"step of {name}")
    _check_equal((reset, steps), _play(env, num_steps, seed), name)
    keys = jax.random.split(jax.random.key(seed), 64)
    starts = jax.tree.map(np.asarray, jax.vmap(lambda key: env.reset(key)[1])(keys))
    for t in np.flatnonzero(steps.terminated | steps.truncated):
        obs, final = (jax.tree.map(lambda x, t=t: x[t], x) for x in (steps.obs, steps.final_obs))
        if _same(obs, final) and not any(
            _same(obs, jax.tree.map(lambda x, i=i: x[i], starts)) for i in range(len(keys))
        ):
            raise ValueError(
                f"{name} ended its episode at step {t} of random actions, but obs is "
                "still the last observation and not the first of a new episode. Reset in step, or "
                "use jaxroll.envs.autoreset(env)."
            )
    for obs in (reset, steps.obs, steps.final_obs):
        _check_inside(env.observation_space, obs, name)


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


# Host environments.


def check_host_step(envs: HostEnv, step: HostStep) -> None:
    """Raise unless shapes, dtypes and values of one step of B host environments are right."""
    name, batch = type(envs).__name__, (envs.num_envs,)
    check_observation(envs.observation_space, step.obs, f"obs of {name}", batch)
    if step.final_obs is not None:
        check_observation(envs.observation_space, step.final_obs, f"final_obs of {name}", batch)
    for field in ("reward", "terminated", "truncated", "valid", "is_first"):
        value, dtype = np.asarray(getattr(step, field)), "float32" if field == "reward" else "bool"
        if value.shape != batch or value.dtype != dtype:
            raise TypeError(
                f"{field} of {name} must be {dtype}{list(batch)}, got "
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
    _check_finite(obs, 0.0, name)


def _check_host_env(first: HostEnv, second: HostEnv, num_steps: int, seed: int) -> None:
    """Play random actions in one, then the same in the other."""
    name, space = type(first).__name__, first.observation_space

    @jax.jit
    def random_actions(obs: PyTree, key: jax.Array) -> PyTree:
        keys = jax.random.split(key, first.num_envs)
        return jax.vmap(functools.partial(_random_action, first.action_space))(obs, keys)

    def play(envs: HostEnv) -> list[PyTree]:
        obs, key = envs.reset(seed), jax.random.key(seed)
        check_host_reset(envs, obs)
        _check_inside(space, obs, name)
        trace = [jax.tree.map(np.array, obs)]
        ended = np.zeros(envs.num_envs, bool)  # on the last step, and not reset yet
        for t in range(num_steps):
            actions = random_actions(obs, jax.random.fold_in(key, t))
            step = envs.step(jax.tree.map(np.asarray, actions))
            check_host_step(envs, step)
            _check_inside(space, step.obs, name)
            done = step.terminated | step.truncated
            begins = ended if envs.resets_on_next_step else done
            if (step.is_first != begins).any() or (step.valid == (ended & begins)).any():
                raise ValueError(
                    f"{name} must begin an episode where the last one ended (is_first), and mark "
                    "the rows that only reset (valid)."
                )
            ended = done & envs.resets_on_next_step
            obs = step.obs
            trace.append(jax.tree.map(np.array, step._replace(final_obs=None)))
        return trace

    _check_equal(play(first), play(second), name)


# Both.


def _random_action(space: spaces.Space, obs: PyTree, key: jax.Array) -> PyTree:
    mask = obs.get(MASK) if isinstance(obs, dict) else None
    if mask is None or not isinstance(space, spaces.Discrete):
        return space.sample(key)
    logits = jnp.where(jnp.asarray(mask, bool), 0.0, -jnp.inf)
    return jax.random.categorical(key, logits).astype(space.dtype)


def _check_finite(obs: PyTree, reward: Any, name: str) -> None:
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


def _check_inside(space: spaces.Space, obs: PyTree, name: str) -> None:
    if not space.contains(jax.tree.map(np.asarray, obs)):
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
