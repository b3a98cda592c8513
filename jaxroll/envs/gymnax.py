"""gymnax environments, and others written in its style.

From gymnax 1.0 on, `step` tells terminated from truncated and hands over the final observation.
Environments of the older style have one `done`: it counts as terminated, except where the
state's clock has reached the limit that the parameters name.

gymnax itself puts an array on a device when it is imported. It is therefore imported when an
environment is first used, or first given options, and not when one of its own is named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import spaces
from jaxroll.checks import check_array, check_count, check_flag, check_number, did_you_mean
from jaxroll.envs.base import Draws, reset_where_done, time_step
from jaxroll.envs.make import Source
from jaxroll.envs.options import Options
from jaxroll.envs.translate import to_space
from jaxroll.types import PyTree, TimeStep

# (field of the state, field of the parameters) by which an old environment limits its time.
_CLOCKS = (
    ("time", "max_steps_in_episode"),
    ("timestep", "max_timesteps"),
    ("step_count", "max_steps"),
    ("t", "max_steps_in_episode"),
)


@dataclasses.dataclass(frozen=True)
class GymnaxEnv:
    """An `Env` from gymnax; equal to another with the same name and options.

    Made by `make_env("CartPole-v1")`, or by `from_gymnax` from an environment at hand.
    """

    name: str
    options: Options = Options()  # given to the constructor
    params: Options = Options()  # fields of EnvParams that differ from the default
    instance: Any = dataclasses.field(default=None, repr=False)  # the one at hand, if any

    @property
    def arguments(self) -> tuple[str, dict[str, Any]] | None:
        """(name, options) with which `make_env` makes it; None: it is one at hand."""
        if self.instance is not None:
            return None
        return self.name, {**self.options.as_dict(), **self.params.as_dict()}

    @property
    def observation_space(self) -> spaces.Space:
        """gymnax's, with the dtype that the observations really have."""
        return _spaces(self)[0]

    @property
    def action_space(self) -> spaces.Space:
        """gymnax's own action space."""
        return _spaces(self)[1]

    @property
    def time_limit(self) -> int | None:
        """Steps after which an episode is truncated; None: the environment decides by itself."""
        from gymnax.environments.environment import Environment

        env, params = _build(self)
        rule = getattr(type(env), "is_truncated", None)
        if rule is not Environment.is_truncated or _has_own_step(env):
            return None
        return max(1, math.ceil(params.max_steps_in_episode))

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Start an episode: (state, obs)."""
        env, params = _build(self)
        with _promotions():
            obs, state = getattr(env, "reset_env", env.reset)(key, params)
            return _strong_types((state, obs))

    def draw(self, key: jax.Array) -> PyTree:
        """The step's own key and the start of the next episode, from the keys that gymnax takes."""
        if _has_own_step(_build(self)[0]):
            return key
        step_key, reset_key = jax.random.split(key)
        return Draws(step_key, *self.reset(reset_key))

    def step(self, key: Any, state: PyTree, action: PyTree) -> tuple[PyTree, TimeStep]:
        """Take one step and reset at an end, as gymnax's own `step` does, with the same keys."""
        env, params = _build(self)
        draws = key if isinstance(key, Draws) else self.draw(key)
        with _promotions():
            if not isinstance(draws, Draws):
                return _strong_types(_own_step(env.step(draws, state, action, params)))
            state, step = _strong_types(_one_step(env, params, draws.step, state, action))
        return reset_where_done(state, step, draws)


def from_gymnax(env: Any, params: Any = None) -> GymnaxEnv:
    """An `Env` from a gymnax environment at hand, or from one in its (old or new) style.

    Args:
      env: has `reset(key, params) -> (obs, state)`, `step(key, state, action, params)` with
        five values (one done) or six (terminated, truncated), and spaces. Where there are
        `reset_env` and `step_env`, as in gymnax, these are used, so that the final observation
        is known.
      params: its parameters; None: `env.default_params`.

    Example:
      >>> import gymnax
      >>> env, params = gymnax.make("Pendulum-v1")
      >>> from_gymnax(env, params.replace(max_steps_in_episode=50)).action_space.shape
      (1,)
    """
    name = getattr(env, "name", None) or type(env).__name__
    return GymnaxEnv(name, params=Options({"params": params}), instance=env)


def make(name: str, **options: Any) -> GymnaxEnv:
    """A gymnax environment by name.

    Args:
      name: as in `gymnax.make`.
      **options: arguments of its constructor or fields of its `EnvParams`.
    """
    env = GymnaxEnv(name)
    if not options and _is_built_in(name):
        return env
    from gymnax import registration

    parameters = inspect.signature(registration._registry[name]).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    constructor = {p.name: p.default for p in parameters if p.kind in kinds}
    params = _build(env)[1]
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    for option, value in options.items():
        if option not in constructor and option not in fields:
            known = sorted(constructor | fields)
            hint = did_you_mean(option, known)
            raise ValueError(f"there is no option {option!r}.{hint} It has {', '.join(known)}.")
        default = constructor.get(option, fields.get(option))
        is_size = option in constructor and type(default) is int and default > 0
        is_limit = any(option == limit for _, limit in _CLOCKS)
        _check_like(option, value, default, at_least=1 if is_size or is_limit else 0)
    own = {k: v for k, v in options.items() if k in constructor}
    changed = {k: v for k, v in options.items() if k not in constructor}
    changed = {k: np.asarray(v) if np.ndim(fields[k]) else v for k, v in changed.items()}
    env = GymnaxEnv(name, Options(own), Options(changed))
    action = spaces.zeros(env.action_space)
    jax.eval_shape(lambda: env.step(jax.random.key(0), env.reset(jax.random.key(0))[0], action))
    return env


def _check_like(name: str, value: Any, default: Any, at_least: int) -> None:
    """Raise if an option is not of its default's kind, where that is a number, flag or array."""
    if isinstance(default, bool | np.bool_):
        check_flag(name, value)
    elif isinstance(default, int | np.integer):
        check_count(name, value, at_least=at_least)
    elif isinstance(default, float | np.floating):
        check_number(name, value, ">= 1" if at_least else None)
    elif isinstance(default, np.ndarray | jax.Array):
        array = check_array(name, value)
        if array.shape != default.shape or not np.isfinite(np.asarray(array)).all():
            raise ValueError(f"{name} must be finite, of shape {default.shape}, got {value!r}.")


def _is_built_in(name: str) -> bool:
    """Whether the text of gymnax's registry has the name: an import would touch a device."""
    package = importlib.util.find_spec("gymnax")
    for folder in (package and package.submodule_search_locations) or ():
        with contextlib.suppress(OSError):
            text = (Path(folder) / "registration.py").read_text()
            return bool(re.fullmatch(r"[\w-]+", name)) and f'"{name}"' in text
    return False


def names() -> list[str]:
    """All registered names."""
    from gymnax import registration

    return sorted(registration.registered_envs)


SOURCE = Source("gymnax", "gymnax", None, make=make, names=names)


@contextlib.contextmanager
def _promotions():
    """A user's strict settings are not for gymnax's own code; its dtypes are those of 32 bits."""
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.enable_x64(False),
    ):
        yield


def _strong_types(tree: Any) -> Any:
    """Arrays that keep their dtype; a weakly typed one widens under x64."""

    def strong(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x.astype(x.dtype)

    return jax.tree.map(strong, tree)


@functools.lru_cache(maxsize=256)
def _build(env: GymnaxEnv) -> tuple[Any, Any]:
    """The gymnax environment and its parameters, made once for all equal values."""
    # Within a trace the constructor's arrays would be tracers, and leak into the next trace.
    with jax.ensure_compile_time_eval(), _promotions():
        if env.instance is not None:
            params = env.params.as_dict()["params"]
            return env.instance, env.instance.default_params if params is None else params
        import gymnax

        built, params = gymnax.make(env.name, **env.options.as_dict())
        return built, params.replace(**env.params.as_dict())


@functools.lru_cache(maxsize=256)
def _spaces(env: GymnaxEnv) -> tuple[spaces.Space, spaces.Space]:
    built, params = _build(env)
    with jax.ensure_compile_time_eval(), _promotions():
        observation, action = built.observation_space(params), built.action_space(params)
    _, obs = jax.eval_shape(lambda: env.reset(jax.random.key(0)))
    return to_space(observation, obs), to_space(action)


def _has_own_step(env: Any) -> bool:
    """Whether `step` is more than step, then reset at an end."""
    from gymnax.environments.environment import Environment

    if isinstance(env, Environment):
        return type(env).step is not Environment.step
    return not (hasattr(env, "step_env") and hasattr(env, "reset_env"))


def _one_step(
    env: Any, params: Any, key: jax.Array, state: PyTree, action: PyTree
) -> tuple[PyTree, TimeStep]:
    """A step without a reset, for both styles."""
    obs, state, reward, done, info = env.step_env(key, state, action, params)
    if hasattr(env, "is_truncated"):
        terminated, truncated = done, env.is_truncated(state, params)
    else:
        truncated = jnp.asarray(done, bool) & _time_is_up(state, params)
        terminated = jnp.asarray(done, bool) & ~truncated
    return state, time_step(obs, reward, terminated, truncated, info)


def _time_is_up(state: Any, params: Any) -> jax.Array:
    for clock, limit in _CLOCKS:
        if hasattr(state, clock) and hasattr(params, limit):
            return jnp.asarray(getattr(state, clock) >= getattr(params, limit), bool)
    return jnp.asarray(False)


def _own_step(out: tuple) -> tuple[PyTree, TimeStep]:
    """What an auto-resetting `step` with six or five values returned, in our form."""
    if len(out) == 6:
        obs, state, reward, terminated, truncated, info = out
        info = dict(info)
        step = time_step(obs, reward, terminated, truncated, info)
        return state, step.replace(final_obs=info.pop("final_observation"), info=info)
    if len(out) != 5:
        raise TypeError(
            "step must return (obs, state, reward, done, info) or (obs, state, reward, "
            f"terminated, truncated, info), got {len(out)} values."
        )
    # The final observation is gone, so an end by the clock cannot bootstrap: all are terminal.
    obs, state, reward, done, info = out
    return state, time_step(obs, reward, done, False, info)
