"""Environments by name: `make_env("CartPole-v1")`, `make_env("gymnasium:CartPole-v1")`.

A source is one file with a `Source`; `register_source` adds it, here or in a user's own package. If
its environments have `arguments`, the (name, options) for `make_env`, a run's config can name them.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import textwrap
from collections.abc import Callable
from typing import Any

from jaxroll.checks import did_you_mean
from jaxroll.envs.base import MEMBERS, Env, HostEnv, HostEnvSpec, check_hashable
from jaxroll.envs.check import check_shapes
from jaxroll.envs.options import UnknownNameError

DEFAULT_SOURCE = "gymnax"
NAMES_SHOWN = 30  # of each source, where all are listed
# The sources that jaxroll brings, by prefix; their files are imported when they are asked for.
_BUILT_IN = ("gymnax", "gymnasium", "envpool")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where environments come from.

    Example, a source of one environment:
      >>> source = Source("mine", package="jax", extra=None,
      ...                 make=lambda name, **options: ("environment", name, options),
      ...                 names=lambda: ["Corridor"])
      >>> register_source(source)
      >>> make_env("mine:Corridor", length=3)
      ('environment', 'Corridor', {'length': 3})
    """

    prefix: str
    package: str  # what must be importable
    extra: str | None  # of jaxroll, that installs it
    make: Callable[..., Any]  # (name, **options) -> Env or HostEnvSpec
    names: Callable[[], list[str]]


_registered: dict[str, Source] = {}


def register_source(source: Source) -> None:
    """Let `make_env` know the environments of a source, under its prefix.

    Example:
      >>> register_source(Source("toys", package="jax", extra=None, names=lambda: ["Dice"],
      ...                        make=lambda name, **options: (name, options)))
      >>> make_env("toys:Dice", sides=6)
      ('Dice', {'sides': 6})
    """
    _registered[source.prefix] = source


def make_env(name: str, **options: Any) -> Any:
    """An environment by name: an `Env`, or a `HostEnvSpec` if it runs on the host.

    Args:
      name: "CartPole-v1" from gymnax, or with the prefix of another source:
        "gymnasium:CartPole-v1", "gymnasium:ALE/Breakout-v5", "envpool:Pong-v5".
      **options: of the environment, checked by its source. gymnax takes arguments of the
        environment's constructor and fields of its `EnvParams`.

    Example:
      >>> make_env("MemoryChain-bsuite", memory_length=10).action_space
      Discrete(n=2, dtype=dtype('int32'))
      >>> make_env("CartPol-v1")
      Traceback (most recent call last):
        ...
      ValueError: 'CartPol-v1' is not an environment of gymnax. Did you mean 'CartPole-v1'?
    """
    if not isinstance(name, str):
        raise TypeError(f'make_env takes a name such as "CartPole-v1", got {name!r}.')
    prefix, colon, rest = name.partition(":")
    if not colon:
        prefix, rest = DEFAULT_SOURCE, name
    source = _source(prefix)
    if not _is_installed(source):
        raise ImportError(
            f"{name!r} needs the package {source.package}, which is not installed."
            + (f' Install it: pip install "jaxroll[{source.extra}]".' if source.extra else "")
        )
    try:
        return source.make(rest, **options)
    except UnknownNameError as error:
        others = [] if colon else _elsewhere(rest)
        hint = f" Another source has it: make_env({others[0]!r})." if others else ""
        raise ValueError(f"{error}{hint}") from None


def as_env(env: Any, argument: str = "env") -> Any:
    """What was given where an environment is expected, as an `Env`, `HostEnvSpec` or `HostEnv`.

    Args:
      env: one of these; a name for `make_env`; a gymnax environment, or (environment, params); a
        Gymnasium environment that was made by name; a function that makes one, or that makes a
        `VectorEnv` of a number of them; a `VectorEnv`, or a list of environments or functions.
        The last two are open environments, which evaluate but cannot be made anew.
      argument: how to call it in an error.

    Example:
      >>> import gymnasium
      >>> as_env(gymnasium.make("CartPole-v1")).observation_space.shape
      (4,)
    """
    if isinstance(env, str):
        return make_env(env)
    if isinstance(env, HostEnv | HostEnvSpec) or type(env).__module__.startswith("jaxroll.envs."):
        return env
    kinds = _packages(env)
    if "gymnasium" in kinds or isinstance(env, list) or _is_function(env):
        from jaxroll.envs.gymnasium import from_object

        return from_object(env, argument)
    if isinstance(env, tuple) and len(env) == 2 and "gymnax" in _packages(env[0]):
        kinds, env, params = {"gymnax"}, *env
    else:
        params = None
    if "gymnax" in kinds or hasattr(env, "default_params"):
        from jaxroll.envs.gymnax import from_gymnax

        return from_gymnax(env, params)
    if isinstance(env, type) or not all(hasattr(env, name) for name in MEMBERS):
        raise TypeError(
            f"{argument} must be an environment, got {env!r}. Use jaxroll.make_env(name), "
            "jaxroll.envs.autoreset(env) for a JAX environment of your own, or "
            "jaxroll.envs.from_gymnasium(lambda num_envs: vector_env)."
        )
    check_hashable(env)
    check_shapes(env)
    return env


def as_device_env(env: Any, instead: str) -> Env:
    """`as_env` where only a JAX environment will do; `instead` is for one of the host."""
    env = as_env(env)
    if isinstance(env, HostEnv | HostEnvSpec):
        raise TypeError(f"{type(env).__name__} runs on the host, outside of jit. Use {instead}.")
    return env


def _packages(env: Any) -> set[str]:
    """Where its classes come from; nothing is imported to know it."""
    return {base.__module__.partition(".")[0] for base in type(env).__mro__}


def _is_function(env: Any) -> bool:
    return callable(env) and not hasattr(env, "step") and not isinstance(env, type)


class EnvNames(list[str]):
    """A list of names that prints by source, a few of each."""

    def __repr__(self) -> str:
        by_source: dict[str, list[str]] = {}
        for name in self:
            by_source.setdefault(name.partition(":")[0] if ":" in name else "", []).append(name)
        lines = []
        for source, names in by_source.items():
            title = source or DEFAULT_SOURCE
            more = len(names) - NAMES_SHOWN if len(by_source) > 1 else 0
            shown = ", ".join(names[:-more] if more > 0 else names)
            shown += f", … and {more} more: list_envs({title!r})" if more > 0 else ""
            lines.append(f"{title} ({len(names)}): {shown}")
        return "\n".join(
            textwrap.fill(x, 100, subsequent_indent="  ", break_on_hyphens=False) for x in lines
        )


def list_envs(source: str | None = None) -> EnvNames:
    """Every name that `make_env` takes, from the sources that are installed: a list of strings.

    Args:
      source: the prefix of one source; None: all. Names of gymnax have no prefix.

    Example:
      >>> "CartPole-v1" in list_envs("gymnax")
      True
    """
    prefixes = _prefixes() if source is None else [_source(source).prefix]
    return EnvNames(
        name if prefix == DEFAULT_SOURCE else f"{prefix}:{name}"
        for prefix in prefixes
        if _is_installed(_source(prefix))
        for name in _source(prefix).names()
    )


def _is_installed(source: Source) -> bool:
    return importlib.util.find_spec(source.package) is not None


def _prefixes() -> list[str]:
    return [*_BUILT_IN, *(p for p in _registered if p not in _BUILT_IN)]


def _source(prefix: str) -> Source:
    if not isinstance(prefix, str):
        raise TypeError(f"source must be the name of a source, got {prefix!r}.")
    if prefix in _registered:
        return _registered[prefix]
    if prefix in _BUILT_IN:
        return importlib.import_module(f"jaxroll.envs.{prefix}").SOURCE
    raise ValueError(
        f"{prefix!r} is not a source of environments.{did_you_mean(prefix, _prefixes())} "
        f"There are {', '.join(_prefixes())}; add one with jaxroll.envs.register_source."
    )


def _elsewhere(name: str) -> list[str]:
    """The same name in other installed sources, with their prefix."""
    others = [_source(prefix) for prefix in _prefixes() if prefix != DEFAULT_SOURCE]
    return [f"{s.prefix}:{name}" for s in others if _is_installed(s) and name in s.names()]
