"""Gymnasium's vector environments on the host: by name, from a function, or at hand.

Three ways of resetting come out as one contract (see `HostStep`): on the same step, on the next
step, or when told to (which is then done at once, like on the same step). Observations and
rewards arrive as float32 where they were float64, integers as int32.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxroll import spaces
from jaxroll.envs.actions import OutOfRange, action_checker
from jaxroll.envs.base import HostEnv, HostEnvSpec, HostStep
from jaxroll.envs.make import Source
from jaxroll.envs.values import Options, UnknownNameError, suggestion, unusable
from jaxroll.types import PyTree

MODES = ("SameStep", "NextStep", "Disabled")
_NARROW = {np.dtype("float64"): np.float32, np.dtype("int64"): np.int32}


def narrow(dtype: Any) -> np.dtype:
    """The dtype in which jaxroll keeps data of this one."""
    return np.dtype(_NARROW.get(np.dtype(dtype), dtype))


def to_space(space: Any) -> spaces.Space:
    """A space of Gymnasium as ours; a Tuple becomes a Dict with the keys "0" to "n".

    Example:
      >>> import gymnasium
      >>> to_space(gymnasium.spaces.Discrete(3, start=-1))
      Discrete(n=3, dtype=dtype('int32'))
    """
    kind = type(space).__name__
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(tuple(np.asarray(space.nvec).ravel()))
    if kind == "MultiBinary":
        return spaces.MultiBinary(int(np.prod(space.shape)))
    if kind == "Box":
        return spaces.Box.create(space.low, space.high, space.shape, narrow(space.dtype))
    if kind == "Dict":
        return spaces.Dict.create({k: to_space(v) for k, v in space.spaces.items()})
    if kind == "Tuple":
        return spaces.Dict.create({str(i): to_space(v) for i, v in enumerate(space.spaces)})
    raise TypeError(
        f"The space {space} has no translation to arrays of a fixed shape. Wrap the environment "
        "so that it shows a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple space."
    )


def reader(space: Any) -> Callable[[Any], PyTree]:
    """A function that brings observations of a space, with any leading axes, into our form."""
    if hasattr(space, "spaces"):  # Dict and Tuple
        named = space.spaces.items() if hasattr(space.spaces, "items") else enumerate(space.spaces)
        parts = {str(k): (k, reader(child)) for k, child in named}
        return lambda obs: {name: read(obs[k]) for name, (k, read) in sorted(parts.items())}
    dtype, start = narrow(space.dtype), _start(space)
    num_axes = len(space.shape)
    shape = spaces.zeros(to_space(space)).shape
    is_reshaped = shape != space.shape

    def read(obs: Any) -> np.ndarray:
        obs = np.asarray(obs)
        if start is not None:
            obs = obs - start
        if obs.dtype != dtype:
            obs = obs.astype(dtype)
        return obs.reshape(*obs.shape[: obs.ndim - num_axes], *shape) if is_reshaped else obs

    return read


def writer(space: Any) -> Callable[[PyTree], Any]:
    """A function from checked actions, [B, ...], to new arrays such as the source wants them."""
    if hasattr(space, "spaces"):
        is_dict = hasattr(space.spaces, "items")
        named = space.spaces.items() if is_dict else enumerate(space.spaces)
        parts = [(k, writer(child)) for k, child in named]
        if is_dict:
            return lambda actions: {k: write(actions[str(k)]) for k, write in parts}
        return lambda actions: tuple(write(actions[str(k)]) for k, write in parts)
    start, dtype, shape = _start(space), space.dtype, space.shape

    def write(actions: np.ndarray) -> np.ndarray:
        # Always a copy: an environment that clips in place must not change what is stored.
        actions = actions.astype(dtype)
        if start is not None:
            actions += start
        return actions.reshape(len(actions), *shape)

    return write


def _start(space: Any) -> Any:
    """Where the space's choices start to count; None: at 0, like ours."""
    start = getattr(space, "start", None)
    return start if start is not None and np.any(start) else None


class VectorHostEnv(HostEnv):
    """A `HostEnv` from a Gymnasium `VectorEnv`.

    Args:
      envs: the vector environment; closed by `close`, and after an exception of its own.
      autoreset_mode: "NextStep", "SameStep", "Disabled" or Gymnasium's `AutoresetMode`; None:
        what its metadata say.
      out_of_range: "clip" or "error", for `Box` actions past their bounds.

    Example:
      >>> import gymnasium
      >>> with VectorHostEnv(gymnasium.make_vec("CartPole-v1", num_envs=3)) as envs:
      ...     obs = envs.reset(seed=0)
      ...     step = envs.step(np.array([0, 1, 0]))
      >>> obs.shape, step.reward.dtype, step.valid
      ((3, 4), dtype('float32'), array([ True,  True,  True]))
    """

    def __init__(
        self,
        envs: Any,
        *,
        autoreset_mode: Any = None,
        out_of_range: OutOfRange = "clip",
    ):
        self._envs = envs
        _check_members(envs)
        self._mode = _autoreset_mode(envs, autoreset_mode)
        self._read = reader(envs.single_observation_space)
        self._write = writer(envs.single_action_space)
        self.num_envs = int(envs.num_envs)
        self.observation_space = to_space(envs.single_observation_space)
        self.action_space = to_space(envs.single_action_space)
        self.resets_on_next_step = self._mode == "NextStep"
        self._check = action_checker(self.action_space, self.num_envs, out_of_range)
        self._ended = np.zeros(self.num_envs, bool)
        self._all = np.ones(self.num_envs, bool)
        self._all.flags.writeable = False
        self._closed = False
        _close_at_exit(self)

    def reset(self, seed: int) -> PyTree:
        """Start an episode in each environment: obs."""
        self._check_open()
        try:
            # Vector environments count on from the seed, some of them in int32.
            obs, _ = self._reset_envs(int(seed) % 2**30)
            obs = self._read(obs)
        except BaseException:
            self._close_after_error()
            raise
        self._ended = np.zeros(self.num_envs, bool)
        return obs

    def step(self, actions: PyTree) -> HostStep:
        """Check the actions and take one step in each environment."""
        self._check_open()
        actions = self._write(self._check(actions))
        try:
            obs, reward, terminated, truncated, info = self._envs.step(actions)
            obs = self._read(obs)
            reward = self._numbers("reward", reward).astype(np.float32)
            terminated = self._flags("terminated", terminated)
            truncated = self._flags("truncated", truncated)
            if self.resets_on_next_step:
                return self._after_next_step(obs, reward, terminated, truncated)
            done = terminated | truncated
            final_obs = None
            if done.any():
                if self._mode == "SameStep":
                    final_obs = self._final_obs(info, obs, done)
                else:
                    # A copy: the reset may overwrite the environments' own buffer.
                    final_obs = jax.tree.map(np.copy, obs)
                    obs = self._reset_where(done, final_obs)
        except BaseException:
            self._close_after_error()
            raise
        return HostStep(obs, reward, terminated, truncated, final_obs, self._all, done)

    def close(self) -> None:
        """Close the environments."""
        if not self._closed:
            self._closed = True
            self._envs.close()

    def _reset_envs(self, seed: int) -> tuple[Any, Any]:
        return self._envs.reset(seed=seed)

    def _numbers(self, name: str, value: Any) -> np.ndarray:
        array = np.asarray(value)
        if array.shape != (self.num_envs,):
            raise ValueError(
                f"{name} must have shape ({self.num_envs},), one for each environment, got "
                f"{array.shape}."
            )
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{name} must be numbers, got {array.dtype}: {value!r}.")
        return array

    def _flags(self, name: str, value: Any) -> np.ndarray:
        array = self._numbers(name, value)
        if array.dtype != bool:
            if not ((array == 0) | (array == 1)).all():
                raise TypeError(f"{name} must be True or False, got {value!r}.")
            array = array.astype(bool)
        return array

    def _after_next_step(
        self, obs: PyTree, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
    ) -> HostStep:
        ended, valid = self._ended, self._all
        if ended.any():
            valid = ~ended
            reward, terminated, truncated = reward * valid, terminated & valid, truncated & valid
        self._ended = terminated | truncated
        return HostStep(obs, reward, terminated, truncated, None, valid, ended)

    def _final_obs(self, info: dict[str, Any], obs: PyTree, done: np.ndarray) -> PyTree:
        """Dense final observations; Gymnasium has them as objects, ALE as an array."""
        if "final_obs" not in info:
            raise RuntimeError(
                "An environment that resets on the same step must hand over the final "
                f'observations as info["final_obs"], got the keys {sorted(info)}.'
            )
        final = info["final_obs"]
        if not (isinstance(final, np.ndarray) and final.dtype.kind == "O"):
            return self._read(final)
        dense = jax.tree.map(np.copy, obs)
        for i in np.flatnonzero(done):
            jax.tree.map(lambda all, one, i=i: all.__setitem__(i, one), dense, self._read(final[i]))
        return dense

    def _reset_where(self, done: np.ndarray, obs: PyTree) -> PyTree:
        fresh = self._read(self._envs.reset(options={"reset_mask": done.copy()})[0])

        def merge(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            return np.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        return jax.tree.map(merge, obs, fresh)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("The environments are closed. Make new ones: spec.make(num_envs).")

    def _close_after_error(self) -> None:
        # The environment's own exception is the one to see, not one of closing after it.
        with contextlib.suppress(Exception):
            self.close()


_open: weakref.WeakSet[HostEnv] = weakref.WeakSet()


def _close_at_exit(envs: HostEnv) -> None:
    """Close what is still open before the interpreter ends: worker processes outlive it badly."""
    if not _open:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.add(envs)


def _close_all() -> None:
    for envs in list(_open):
        with contextlib.suppress(Exception):
            envs.close()


def _check_members(envs: Any) -> None:
    """Check each environment of a `SyncVectorEnv`: its buffers would cast what they are given."""
    if type(envs).__name__ == "SyncVectorEnv" and hasattr(envs, "envs"):
        envs.envs = [e if isinstance(e, _Checked) else _Checked(e) for e in envs.envs]


class _Checked:
    """One Gymnasium environment whose rewards and flags are what they should be, or an error."""

    def __init__(self, env: Any):
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, action: Any) -> tuple:
        out = self.env.step(action)
        if not isinstance(out, tuple) or len(out) != 5:
            got = f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__
            raise TypeError(
                f"step of {self.env} must return (obs, reward, terminated, truncated, info), got "
                f"{got}."
            )
        _, reward, *flags, _ = out
        if type(reward) is not float:
            kind = np.asarray(reward).dtype.kind
            if np.ndim(reward) or kind not in "biuf":
                raise TypeError(f"reward of {self.env} must be a number, got {reward!r}.")
        for name, flag in zip(("terminated", "truncated"), flags):
            if not isinstance(flag, bool | np.bool_) and not (
                np.ndim(flag) == 0 and np.asarray(flag).dtype.kind in "biu" and flag in (0, 1)
            ):
                raise TypeError(f"{name} of {self.env} must be True or False, got {flag!r}.")
        return out


def _autoreset_mode(envs: Any, mode: Any) -> str:
    if mode is None:
        mode = envs.metadata.get("autoreset_mode")
    mode = getattr(mode, "value", mode)
    if mode not in MODES:
        raise ValueError(
            f"The autoreset mode must be one of {', '.join(MODES)}, got {mode!r} for {envs}. Set "
            'its metadata["autoreset_mode"], or pass autoreset_mode.'
        )
    return mode


@dataclasses.dataclass(frozen=True)
class GymnasiumSpec(HostEnvSpec):
    """How to make Gymnasium environments; see `make` for the fields."""

    name: str
    options: Options = Options()
    function: Callable[[int], Any] | None = None
    vectorization_mode: str | None = None
    autoreset_mode: str | None = None
    out_of_range: OutOfRange = "clip"

    @property
    def arguments(self) -> tuple[str, dict[str, Any]] | None:
        """(name, options) with which `make_env` makes it; None: a function does."""
        if self.function is not None:
            return None
        names = ("vectorization_mode", "autoreset_mode", "out_of_range")
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return f"gymnasium:{self.name}", {**own, **self.options.as_dict()}

    @property
    def observation_space(self) -> spaces.Space:
        """Of one environment."""
        return _spaces(self)[0]

    @property
    def action_space(self) -> spaces.Space:
        """Of one environment."""
        return _spaces(self)[1]

    def make(self, num_envs: int) -> VectorHostEnv:
        """Open `num_envs` environments, with the environment's own vector form if it has one."""
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}.")
        mode = self.autoreset_mode
        if self.function is not None:
            envs = self.function(num_envs)
        else:
            envs, mode = self._make_vec(num_envs), None
        return VectorHostEnv(
            envs,
            autoreset_mode=mode,
            out_of_range=self.out_of_range,
        )

    def _make_vec(self, num_envs: int) -> Any:
        import gymnasium

        spec, options = gymnasium.spec(self.name), self.options.as_dict()
        own_form = self.vectorization_mode == "vector_entry_point" or (
            self.vectorization_mode is None and spec.vector_entry_point is not None
        )
        # On the same step where there is a choice: then every row is experience.
        mode = self.autoreset_mode or "SameStep"
        if own_form:
            if _takes_mode(spec.vector_entry_point):
                options["autoreset_mode"] = gymnasium.vector.AutoresetMode(mode)
            elif self.autoreset_mode not in (None, "NextStep"):
                raise ValueError(
                    f"The vector form of {self.name} has its own autoreset mode, got "
                    f'{self.autoreset_mode!r}. Add vectorization_mode="sync" to choose one.'
                )
            return gymnasium.make_vec(self.name, num_envs, self.vectorization_mode, **options)
        vector: dict[str, Any] = {"autoreset_mode": gymnasium.vector.AutoresetMode(mode)}
        how = self.vectorization_mode or "sync"
        if how == "async":
            vector["context"] = "forkserver"  # a fork of JAX's threads can deadlock
        return gymnasium.make_vec(self.name, num_envs, how, vector_kwargs=vector, **options)


def from_gymnasium(make: Callable[[int], Any], **settings: Any) -> GymnasiumSpec:
    """A `HostEnvSpec` from a function that makes a `VectorEnv` of so many environments.

    Args:
      make: `num_envs -> VectorEnv`. Specs are equal if they have the same function.
      **settings: `autoreset_mode`, `out_of_range`, as in `VectorHostEnv`.

    Example:
      >>> import gymnasium
      >>> spec = from_gymnasium(lambda n: gymnasium.make_vec("Acrobot-v1", num_envs=n))
      >>> spec.action_space
      Discrete(n=3, dtype=dtype('int32'))
    """
    return GymnasiumSpec(getattr(make, "__name__", "VectorEnv"), function=make, **settings)


@dataclasses.dataclass(frozen=True)
class _Repeat:
    """A function num_envs -> VectorEnv, from one that makes a single environment."""

    factory: Callable[[], Any]

    def __call__(self, num_envs: int) -> Any:
        return _sync([self.factory] * num_envs)


def _sync(factories: list[Callable[[], Any]]) -> Any:
    from gymnasium import vector

    return vector.SyncVectorEnv(factories, autoreset_mode=vector.AutoresetMode.SAME_STEP)


def from_object(env: Any, argument: str) -> HostEnv | HostEnvSpec:
    """For `as_env`: an environment, a function, a `VectorEnv` or a list, as one of ours."""
    import gymnasium

    if isinstance(env, gymnasium.vector.VectorEnv):
        return VectorHostEnv(env)
    if isinstance(env, list):
        if not env or not all(callable(e) or isinstance(e, gymnasium.Env) for e in env):
            raise TypeError(f"{argument} must list Gymnasium environments, got {env!r}.")
        return VectorHostEnv(_sync([e if callable(e) else (lambda e=e: e) for e in env]))
    if isinstance(env, gymnasium.Env):
        if env.spec is None:
            raise TypeError(
                f"{argument} is a single environment, {env}, that Gymnasium cannot make again. "
                "Give a function that makes one: lambda: MyEnv(...)."
            )
        return from_gymnasium(_Repeat(functools.partial(gymnasium.make, env.spec)))
    needed = [
        p
        for p in inspect.signature(env).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return from_gymnasium(env if needed else _Repeat(env))


def make(
    name: str,
    *,
    vectorization_mode: str | None = None,
    autoreset_mode: Any = None,
    out_of_range: OutOfRange = "clip",
    **options: Any,
) -> GymnasiumSpec:
    """A Gymnasium environment by name; one is opened at once, to read its spaces, and closed.

    Args:
      name: as in `gymnasium.make_vec`, "ALE/…" included.
      vectorization_mode: "sync", "async", "vector_entry_point"; None: the last if there is one,
        otherwise "sync".
      autoreset_mode: "SameStep", "NextStep" or "Disabled"; None: "SameStep" where it can be
        chosen.
      out_of_range: "clip" or "error", for `Box` actions past their bounds.
      **options: arguments of the environment.
    """
    if vectorization_mode not in (None, "sync", "async", "vector_entry_point"):
        raise ValueError(
            'vectorization_mode must be "sync", "async" or "vector_entry_point", got '
            f"{vectorization_mode!r}."
        )
    mode = getattr(autoreset_mode, "value", autoreset_mode)
    if mode not in (None, *MODES):
        raise ValueError(f"autoreset_mode must be one of {', '.join(MODES)}, got {mode!r}.")
    import gymnasium

    if name.startswith("ALE/") and not _register_atari():
        raise ImportError(
            f'{name!r} needs the package ale_py. Install it: pip install "jaxroll[atari]".'
        )
    try:
        gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv:
        raise UnknownNameError(
            f"{name!r} is not an environment of Gymnasium.{suggestion(name, names())}"
        ) from None
    spec = GymnasiumSpec(
        name,
        Options.create(options),
        vectorization_mode=vectorization_mode,
        autoreset_mode=mode,
        out_of_range=out_of_range,
    )
    try:
        _spaces(spec)
    except gymnasium.error.DependencyNotInstalled as error:
        extra = "mujoco" if "mujoco" in str(error).lower() else "gymnasium"
        raise ImportError(
            f"{name!r} needs a package that is not installed ({error}). "
            f'Install it: pip install "jaxroll[{extra}]".'
        ) from error
    except Exception as error:
        if not options:
            raise
        raise unusable(name, options, error) from error
    return spec


def names() -> list[str]:
    """All registered names, with ALE's if it is installed."""
    import gymnasium

    _register_atari()
    return sorted(gymnasium.registry)


SOURCE = Source("gymnasium", package="gymnasium", extra="gymnasium", make=make, names=names)


@functools.lru_cache(maxsize=256)
def _spaces(spec: GymnasiumSpec) -> tuple[spaces.Space, spaces.Space]:
    with spec.make(1) as envs:
        return envs.observation_space, envs.action_space


def _register_atari() -> bool:
    if importlib.util.find_spec("ale_py") is None:
        return False
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    return True


def _takes_mode(entry_point: Any) -> bool:
    from gymnasium.envs.registration import load_env_creator

    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return "autoreset_mode" in inspect.signature(creator).parameters
