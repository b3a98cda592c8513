"""Gymnasium's environments on the host: by name, from a function, or at hand."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from jaxroll.checks import check_choice, check_count, did_you_mean
from jaxroll.envs.actions import OutOfRange
from jaxroll.envs.base import HostEnv, HostEnvSpec, host_spaces
from jaxroll.envs.deadline import DEFAULT_TIMEOUT
from jaxroll.envs.make import Source
from jaxroll.envs.options import Options, UnknownNameError, attempt
from jaxroll.envs.vector import MODES, VectorHostEnv


@dataclasses.dataclass(frozen=True)
class GymnasiumSpec(HostEnvSpec):
    """How to make Gymnasium environments; see `make` for the fields."""

    name: str
    options: Options = Options()
    function: Callable[[int], Any] | None = None
    vectorization_mode: str | None = None
    autoreset_mode: str | None = None
    out_of_range: OutOfRange = "clip"
    env_timeout: float | None = DEFAULT_TIMEOUT

    @property
    def arguments(self) -> tuple[str, dict[str, Any]] | None:
        """(name, options) with which `make_env` makes it; None: a function does."""
        if self.function is not None:
            return None
        names = ("vectorization_mode", "autoreset_mode", "out_of_range")
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.env_timeout not in (None, DEFAULT_TIMEOUT):
            own["env_timeout"] = self.env_timeout
        return f"gymnasium:{self.name}", {**own, **self.options.as_dict()}

    def make(self, num_envs: int) -> VectorHostEnv:
        """Open `num_envs` environments, with the environment's own vector form if it has one."""
        num_envs = check_count("num_envs", num_envs)
        mode = self.autoreset_mode
        if self.function is not None:
            envs = self.function(num_envs)
        else:
            envs, mode = self._make_vec(num_envs), None
        return VectorHostEnv(
            envs,
            autoreset_mode=mode,
            out_of_range=self.out_of_range,
            env_timeout=self.env_timeout,
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
      **settings: `autoreset_mode`, `out_of_range`, `env_timeout`, as in `VectorHostEnv`.

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
    env_timeout: float | None = DEFAULT_TIMEOUT,
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
      env_timeout: seconds that a reset or a step may take; None: any time.
      **options: arguments of the environment.
    """
    forms = ("sync", "async", "vector_entry_point", None)
    check_choice("vectorization_mode", vectorization_mode, forms)
    mode = getattr(autoreset_mode, "value", autoreset_mode)
    check_choice("autoreset_mode", mode, (*MODES, None))
    import gymnasium

    if name.startswith("ALE/") and not _register_atari():
        raise ImportError(
            f'{name!r} needs the package ale_py. Install it: pip install "jaxroll[atari]".'
        )
    try:
        gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv:
        raise UnknownNameError(
            f"{name!r} is not an environment of Gymnasium.{did_you_mean(name, names())}"
        ) from None
    spec = GymnasiumSpec(
        name,
        Options(options),
        vectorization_mode=vectorization_mode,
        autoreset_mode=mode,
        out_of_range=out_of_range,
        env_timeout=env_timeout,
    )

    def open_one() -> None:
        try:
            host_spaces(spec)
        except gymnasium.error.DependencyNotInstalled as error:
            extra = "mujoco" if "mujoco" in str(error).lower() else "gymnasium"
            raise ImportError(
                f"{name!r} needs a package that is not installed ({error}). "
                f'Install it: pip install "jaxroll[{extra}]".'
            ) from error

    attempt(name, options, open_one)
    return spec


def names() -> list[str]:
    """All registered names, with ALE's if it is installed."""
    import gymnasium

    _register_atari()
    return sorted(gymnasium.registry)


SOURCE = Source("gymnasium", package="gymnasium", extra="gymnasium", make=make, names=names)


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
