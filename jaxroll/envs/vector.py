"""A Gymnasium `VectorEnv` as a `HostEnv`.

Three ways of resetting come out as one contract (see `HostStep`): on the same step, on the next
step, or when told to (which is then done at once, like on the same step). Observations and
rewards arrive as float32 where they were float64, integers as int32.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxroll import spaces
from jaxroll.envs.actions import OutOfRange, action_checker
from jaxroll.envs.base import HostEnv, HostStep
from jaxroll.envs.deadline import DEFAULT_TIMEOUT, Deadline
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
        return spaces.Box(space.low, space.high, space.shape, narrow(space.dtype))
    if kind in ("Dict", "Tuple"):
        return spaces.Dict({str(k): to_space(child) for k, child in _children(space)})
    raise TypeError(
        f"The space {space} has no translation to arrays of a fixed shape. Wrap the environment "
        "so that it shows a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple space."
    )


def reader(space: Any) -> Callable[[Any], PyTree]:
    """A function that brings observations of a space, with any leading axes, into our form."""
    if hasattr(space, "spaces"):
        parts = sorted((str(k), k, reader(child)) for k, child in _children(space))
        return lambda obs: {name: read(obs[k]) for name, k, read in parts}
    dtype, start, num_axes = narrow(space.dtype), _start(space), len(space.shape)
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
        parts = [(k, writer(child)) for k, child in _children(space)]
        if hasattr(space.spaces, "items"):
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


def _children(space: Any) -> list[tuple[Any, Any]]:
    """The named parts of a Dict, the numbered ones of a Tuple."""
    parts = space.spaces
    return list(parts.items() if hasattr(parts, "items") else enumerate(parts))


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
      env_timeout: seconds that a reset or a step may take before it is a `TimeoutError`; None:
        any time.

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
        env_timeout: float | None = DEFAULT_TIMEOUT,
    ):
        self._envs = envs
        self._mode = _autoreset_mode(envs, autoreset_mode)
        self._read = reader(envs.single_observation_space)
        self._write = writer(envs.single_action_space)
        self.num_envs = int(envs.num_envs)
        self.observation_space = to_space(envs.single_observation_space)
        self.action_space = to_space(envs.single_action_space)
        self.resets_on_next_step = self._mode == "NextStep"
        self._check = action_checker(self.action_space, self.num_envs, out_of_range)
        self._deadline = Deadline(env_timeout, self._waiting_for)
        self._current = [-1]  # the environment that is being stepped, if there is one at a time
        _check_members(envs, self._current)
        _warn_of_fork(envs)
        self._ended = np.zeros(self.num_envs, bool)
        self._all = np.ones(self.num_envs, bool)
        self._all.flags.writeable = False
        self._closed = False
        _close_at_exit(self)

    def reset(self, seed: int) -> PyTree:
        """Start an episode in each environment: obs."""
        with self._running():
            # Vector environments count on from the seed, some of them in int32.
            obs, _ = self._reset_envs(int(seed) % 2**30)
            obs = self._read(obs)
        self._ended = np.zeros(self.num_envs, bool)
        return obs

    def step(self, actions: PyTree) -> HostStep:
        """Check the actions and take one step in each environment."""
        self._check_open()
        actions = self._write(self._check(actions))
        with self._running():
            obs, reward, terminated, truncated, info = self._step_envs(actions)
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
        return HostStep(obs, reward, terminated, truncated, final_obs, self._all, done)

    def close(self) -> None:
        """Close the environments."""
        if not self._closed:
            self._closed = True
            with self._deadline:
                self._envs.close()

    @contextlib.contextmanager
    def _running(self) -> Any:
        """Within the deadline; after an exception, of whatever kind, the environments close."""
        self._check_open()
        try:
            with self._deadline:
                yield
        except BaseException:
            # The environment's own exception is the one to see, not one of closing after it.
            workers = getattr(self._envs, "processes", ())  # one of them may hang
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._closed = self._closed or bool(workers)
                self._envs.close(terminate=True) if workers else self.close()
            for worker in workers:
                with contextlib.suppress(Exception):
                    worker.terminate()
                    worker.join(5)
            raise

    def _reset_envs(self, seed: int) -> tuple[Any, Any]:
        if not hasattr(self._envs, "reset_wait"):
            return self._envs.reset(seed=seed)
        self._envs.reset_async(seed=seed)
        return self._wait(self._envs.reset_wait)

    def _step_envs(self, actions: Any) -> tuple:
        if not hasattr(self._envs, "step_wait"):
            return self._envs.step(actions)
        self._envs.step_async(actions)
        return self._wait(self._envs.step_wait)

    def _wait(self, wait: Callable[..., tuple]) -> tuple:
        """The answers of worker processes, none of them read before all are there."""
        try:
            return wait(timeout=self._deadline.seconds)
        except multiprocessing.TimeoutError:
            raise TimeoutError(self._deadline.message) from None

    def _waiting_for(self) -> str:
        """Which environment has not returned, for an error."""
        late = [self._current[0]] if self._current[0] >= 0 else []
        pipes = getattr(self._envs, "parent_pipes", ())
        late += [i for i, pipe in enumerate(pipes) if not pipe.closed and not pipe.poll(0)]
        which = f"environment {', '.join(map(str, late))} of" if late else "one of"
        return f"{which} the {self.num_envs} environments of {self._envs}"

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


def _warn_of_fork(envs: Any) -> None:
    """Warn of workers that were forked from this process, in which JAX may have threads."""
    kinds = {getattr(type(p), "_start_method", None) for p in getattr(envs, "processes", ())}
    if "fork" in {kind or multiprocessing.get_start_method() for kind in kinds}:
        warnings.warn(
            f"The workers of {envs} were forked, which can hang once JAX has started its threads. "
            'Use AsyncVectorEnv(..., context="forkserver"), or make_env("gymnasium:…", '
            'vectorization_mode="async"), which does.',
            RuntimeWarning,
            stacklevel=3,
        )


def _check_members(envs: Any, current: list[int]) -> None:
    """Check each environment of a `SyncVectorEnv`: its buffers would cast what they are given."""
    if type(envs).__name__ == "SyncVectorEnv" and hasattr(envs, "envs"):
        envs.envs = [
            _Checked(e.env if isinstance(e, _Checked) else e, i, current)
            for i, e in enumerate(envs.envs)
        ]


class _Checked:
    """One Gymnasium environment whose rewards and flags are what they should be, or an error."""

    def __init__(self, env: Any, index: int, current: list[int]):
        self.env, self._index, self._current = env, index, current

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, **options: Any) -> Any:
        self._current[0] = self._index
        return self.env.reset(**options)

    def step(self, action: Any) -> tuple:
        self._current[0] = self._index
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
