"""Gymnasium's environments on the host: by name, from a function, or at hand."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from jaxroll.checks import check_choice, check_count
from jaxroll.envs.base import HostEnv, HostEnvSpec
from jaxroll.envs.make import Source
from jaxroll.envs.vector import MODES, VectorHostEnv, VectorSpec


@dataclasses.dataclass(frozen=True)
class GymnasiumSpec(VectorSpec):
    """How to make Gymnasium environments by name; `options` are arguments of the environment.

    Args:
      name: as in `gymnasium.make_vec`, "ALE/…" included.
      vectorization_mode: "sync", "async", "vector_entry_point"; None: the last if there is one,
        otherwise "sync".
      autoreset_mode: "SameStep", "NextStep" or "Disabled"; None: "SameStep" where it can be
        chosen.
    """

    vectorization_mode: str | None = None
    autoreset_mode: Any = None

    source = "gymnasium"

    def __post_init__(self):
        forms = ("sync", "async", "vector_entry_point", None)
        check_choice("vectorization_mode", self.vectorization_mode, forms)
        mode = getattr(self.autoreset_mode, "value", self.autoreset_mode)
        object.__setattr__(
            self, "autoreset_mode", check_choice("autoreset_mode", mode, (*MODES, None))
        )

    def make(self, num_envs: int) -> VectorHostEnv:
        """Open `num_envs` environments, with the environment's own vector form if it has one."""
        import gymnasium

        num_envs = check_count("num_envs", num_envs)
        if self.name.startswith("ALE/") and not _register_atari():
            raise ImportError(
                f'{self.name!r} needs the package ale_py. Install it: pip install "jaxroll[atari]".'
            )
        try:
            return VectorHostEnv(self._make_vec(num_envs), **self.settings())
        except gymnasium.error.DependencyNotInstalled as error:
            extra = "mujoco" if "mujoco" in str(error).lower() else "gymnasium"
            raise ImportError(
                f"{self.name!r} needs a package that is not installed ({error}). "
                f'Install it: pip install "jaxroll[{extra}]".'
            ) from error

    def _make_vec(self, num_envs: int) -> Any:
        import gymnasium

        entry_point = gymnasium.spec(self.name).vector_entry_point
        how, options = self.vectorization_mode, self.options.as_dict()
        # On the same step where there is a choice: then every row is experience.
        mode: dict[str, Any] = {
            "autoreset_mode": gymnasium.vector.AutoresetMode(self.autoreset_mode or "SameStep")
        }
        if how == "vector_entry_point" or (how is None and entry_point is not None):
            if _takes_mode(entry_point):
                options |= mode
            elif self.autoreset_mode not in (None, "NextStep"):
                raise ValueError(
                    f"the vector form of {self.name} has its own autoreset mode, got "
                    f'{self.autoreset_mode!r}. Add vectorization_mode="sync" to choose one.'
                )
            return gymnasium.make_vec(self.name, num_envs, how, **options)
        if how == "async":
            mode["context"] = "forkserver"  # a fork of JAX's threads can deadlock
        return gymnasium.make_vec(self.name, num_envs, how or "sync", vector_kwargs=mode, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionSpec(VectorSpec):
    """How a function makes vector environments; made by `from_gymnasium`."""

    function: Callable[[int], Any]
    autoreset_mode: Any = None

    @property
    def arguments(self) -> None:
        """`make_env` cannot make it."""

    def make(self, num_envs: int) -> VectorHostEnv:
        """Open `num_envs` environments."""
        envs = self.function(check_count("num_envs", num_envs))
        return VectorHostEnv(envs, autoreset_mode=self.autoreset_mode, **self.settings())


def from_gymnasium(make: Callable[[int], Any], **settings: Any) -> FunctionSpec:
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
    return FunctionSpec(getattr(make, "__name__", "VectorEnv"), function=make, **settings)


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
    needs_number = any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(env).parameters.values()
    )
    return from_gymnasium(env if needs_number else _Repeat(env))


def names() -> list[str]:
    """All registered names, with ALE's if it is installed."""
    import gymnasium

    _register_atari()
    return sorted(gymnasium.registry)


SOURCE = Source("gymnasium", "gymnasium", "gymnasium", make=GymnasiumSpec.from_options, names=names)


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
