"""A Gymnasium `VectorEnv` as a `HostEnv`.

Three ways of resetting come out as one contract (see `HostStep`): on the same step, on the next
step, or when told to (which is then done at once, like on the same step).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing.util  # registers its own end first, so that ours comes before it
import warnings
import weakref
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jaxroll.envs.base import HostEnv, HostEnvSpec, HostStep
from jaxroll.envs.deadline import DEFAULT_TIMEOUT, Deadline
from jaxroll.envs.options import Options
from jaxroll.envs.translate import OutOfRange, action_checker, reader, to_space, writer
from jaxroll.types import PyTree

MODES = ("SameStep", "NextStep", "Disabled")


@dataclasses.dataclass(frozen=True)
class VectorSpec(HostEnvSpec):
    """How to make vector environments of a source: `make` opens them as a `VectorHostEnv`.

    Args:
      name: of the environment.
      options: of the environment.
      out_of_range: "clip" or "error", for `Box` actions past their bounds.
      env_timeout: seconds that a reset or a step may take; None: any time.
    """

    name: str
    options: Options = Options()
    out_of_range: OutOfRange = "clip"
    env_timeout: float | None = DEFAULT_TIMEOUT

    source: ClassVar[str] = ""  # its prefix for make_env

    @classmethod
    def from_options(cls, name: str, **options: Any) -> Self:
        """For `Source.make`: options that are fields are settings, the others the environment's."""
        own = {f.name for f in dataclasses.fields(cls)} - {"name", "options"}
        settings = {k: options.pop(k) for k in own & options.keys()}
        return cls(name, Options(options), **settings)

    @property
    def arguments(self) -> tuple[str, dict[str, Any]] | None:
        """(name, options) with which `make_env` makes it; None: it cannot."""
        settings = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("name", "options") and getattr(self, f.name) != f.default
        }
        return f"{self.source}:{self.name}", {**settings, **self.options.as_dict()}

    def settings(self) -> dict[str, Any]:
        """What a `VectorHostEnv` takes of it."""
        return {"out_of_range": self.out_of_range, "env_timeout": self.env_timeout}


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
        mode = autoreset_mode or envs.metadata.get("autoreset_mode")
        self._mode = getattr(mode, "value", mode)
        if self._mode not in MODES:
            raise ValueError(
                f"The autoreset mode must be one of {', '.join(MODES)}, got {mode!r} for {envs}. "
                'Set its metadata["autoreset_mode"], or pass autoreset_mode.'
            )
        self._envs, self.num_envs = envs, int(envs.num_envs)
        self._read = reader(envs.single_observation_space)
        self._write = writer(envs.single_action_space)
        self.observation_space = to_space(envs.single_observation_space)
        self.action_space = to_space(envs.single_action_space)
        self.resets_on_next_step = self._mode == "NextStep"
        self._check = action_checker(self.action_space, self.num_envs, out_of_range)
        self._deadline = Deadline(env_timeout, self._waiting_for)
        self._current = [-1]  # the environment that is being stepped, if there is one at a time
        if type(envs).__name__ == "SyncVectorEnv" and hasattr(envs, "envs"):
            single = (e.env if isinstance(e, _Checked) else e for e in envs.envs)
            envs.envs = [_Checked(e, i, self._current) for i, e in enumerate(single)]
        _warn_of_fork(envs)
        self._ended = np.zeros(self.num_envs, bool)
        self._all = np.ones(self.num_envs, bool)
        self._all.flags.writeable = False
        self._closed = False
        _open.add(self)

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
            obs, reward, terminated, truncated, info = self._call("step", actions)
            obs, shape = self._read(obs), (self.num_envs,)
            reward = _array("reward", reward, shape).astype(np.float32)
            terminated = _array("terminated", terminated, shape, is_flag=True)
            truncated = _array("truncated", truncated, shape, is_flag=True)
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

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("The environments are closed. Make new ones: spec.make(num_envs).")

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
        return self._call("reset", seed=seed)

    def _call(self, name: str, *args: Any, **options: Any) -> tuple:
        """Reset or step; the answers of worker processes are read when all of them are there."""
        if not hasattr(self._envs, f"{name}_wait"):
            return getattr(self._envs, name)(*args, **options)
        getattr(self._envs, f"{name}_async")(*args, **options)
        try:
            return getattr(self._envs, f"{name}_wait")(timeout=self._deadline.seconds)
        except multiprocessing.TimeoutError:
            raise TimeoutError(self._deadline.message) from None

    def _waiting_for(self) -> str:
        """Which environment has not returned, for an error."""
        late = [self._current[0]] if self._current[0] >= 0 else []
        pipes = getattr(self._envs, "parent_pipes", ())
        late += [i for i, pipe in enumerate(pipes) if not pipe.closed and not pipe.poll(0)]
        which = f"environment {', '.join(map(str, late))} of" if late else "one of"
        return f"{which} the {self.num_envs} environments of {self._envs}"

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


_open: weakref.WeakSet[HostEnv] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what is still open before the interpreter ends: worker processes outlive it badly."""
    for envs in list(_open):
        with contextlib.suppress(Exception):
            envs.close()


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


def _array(name: str, value: Any, shape: tuple[int, ...], *, is_flag: bool = False) -> np.ndarray:
    """Rewards or flags as an array; what numpy would cast without a word is an error."""
    array = np.asarray(value)
    fits = array.shape == shape and array.dtype.kind in "biuf"
    if fits and is_flag and array.dtype != bool:
        fits, array = ((array == 0) | (array == 1)).all(), array.astype(bool)
    if not fits:
        each = f" for each of the {shape[0]} environments" if shape else ""
        wanted = "True or False" if is_flag else "a number"
        raise TypeError(f"{name} must be {wanted}{each}, got {value!r}.")
    return array


class _Checked:
    """One environment of a `SyncVectorEnv`, whose buffers would cast what they are given."""

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
                f"step of {self.env} must return (obs, reward, terminated, truncated, info), "
                f"got {got}."
            )
        _, reward, *flags, _ = out
        if type(reward) is not float:
            _array(f"reward of {self.env}", reward, ())
        for name, flag in zip(("terminated", "truncated"), flags):
            if not isinstance(flag, bool | np.bool_):
                _array(f"{name} of {self.env}", flag, (), is_flag=True)
        return out
