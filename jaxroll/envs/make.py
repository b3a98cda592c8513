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
from jaxroll.envs.base import MEMBERS, Env, HostEnv, HostEnvSpec, check_hashable, host_spaces
from jaxroll.envs.check import check_shapes

DEFAULT_SOURCE = "gymnax"
NAMES_SHOWN = 30  # of each source, where all are listed
# The sources that jaxroll brings, by prefix; their files are imported when they are asked for.
_BUILT_IN = ("gymnax", "gymnasium", "envpool")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where environments come from; see `register_source`."""

    prefix: str
    package: str  # what must be importable
    extra: str | None  # of jaxroll, that installs it
    make: Callable[..., Any]  # (name, **options) -> Env or HostEnvSpec
    names: Callable[[], list[str]]

    @property
    def is_installed(self) -> bool:
        """Whether its package can be imported."""
        return importlib.util.find_spec(self.package) is not None


_registered: dict[str, Source] = {}


def register_source(source: Source) -> None:
    """Let `make_env` know the environments of a source, under its prefix.

    `make_env` explains what goes wrong in `source.make`: a name that `source.names` does not have,
    or options that it does not take.

    Example, a source of one environment:
      >>> source = Source("mine", package="jax", extra=None,
      ...                 make=lambda name, **options: ("environment", name, options),
      ...                 names=lambda: ["Corridor"])
      >>> register_source(source)
      >>> make_env("mine:Corridor", length=3)
      ('environment', 'Corridor', {'length': 3})
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
    if not source.is_installed:
        raise ImportError(
            f"{name!r} needs the package {source.package}, which is not installed."
            + (f' Install it: pip install "jaxroll[{source.extra}]".' if source.extra else "")
        )
    try:
        env = source.make(rest, **options)
        if isinstance(env, HostEnvSpec):
            host_spaces(env)  # opens one: what is wrong with the options is told now
        return env
    except ImportError:
        raise
    except Exception as error:
        names = source.names()
        if rest not in names:
            hint = did_you_mean(rest, names) + ("" if colon else _elsewhere(rest))
            raise ValueError(f"{rest!r} is not an environment of {prefix}.{hint}") from None
        if not options:
            raise
        given = ", ".join(f"{k}={v!r}" for k, v in options.items())
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} cannot be made with {given}: {reason}") from error


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
    is_function = callable(env) and not hasattr(env, "step") and not isinstance(env, type)
    if isinstance(env, list) or is_function or "gymnasium" in _packages(env):
        from jaxroll.envs.gymnasium import from_object

        return from_object(env, argument)
    built, params = env if isinstance(env, tuple) and len(env) == 2 else (env, None)
    if "gymnax" in _packages(built) or hasattr(built, "default_params"):
        from jaxroll.envs.gymnax import from_gymnax

        return from_gymnax(built, params)
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


class EnvNames(list[str]):
    """A list of names that prints by source, a few of each."""

    def __repr__(self) -> str:
        by_source: dict[str, list[str]] = {}
        for name in self:
            source = name.partition(":")[0] if ":" in name else DEFAULT_SOURCE
            by_source.setdefault(source, []).append(name)
        lines = []
        for source, names in by_source.items():
            shown = names if len(by_source) == 1 else names[:NAMES_SHOWN]
            rest = len(names) - len(shown)
            more = f", … and {rest} more: list_envs({source!r})" if rest else ""
            text = f"{source} ({len(names)}): {', '.join(shown)}{more}"
            lines.append(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False))
        return "\n".join(lines)


def list_envs(source: str | None = None) -> EnvNames:
    """Every name that `make_env` takes, from the sources that are installed: a list of strings.

    Args:
      source: the prefix of one source; None: all. Names of gymnax have no prefix.

    Example:
      >>> "CartPole-v1" in list_envs("gymnax")
      True
    """
    if not isinstance(source, str | None):
        raise TypeError(f"source must be the name of a source, got {source!r}.")
    sources = _sources() if source is None else [_source(source)]
    return EnvNames(
        name if s.prefix == DEFAULT_SOURCE else f"{s.prefix}:{name}"
        for s in sources
        if s.is_installed
        for name in s.names()
    )


def _sources() -> list[Source]:
    return [_source(prefix) for prefix in dict.fromkeys((*_BUILT_IN, *_registered))]


def _source(prefix: str) -> Source:
    if prefix in _registered:
        return _registered[prefix]
    if prefix in _BUILT_IN:
        return importlib.import_module(f"jaxroll.envs.{prefix}").SOURCE
    known = [*_BUILT_IN, *_registered]
    raise ValueError(
        f"{prefix!r} is not a source of environments.{did_you_mean(prefix, known)} There are "
        f"{', '.join(known)}; add one with jaxroll.envs.register_source."
    )


def _elsewhere(name: str) -> str:
    """The end of an error: the same name in another installed source, if one has it."""
    for source in _sources():
        if source.prefix != DEFAULT_SOURCE and source.is_installed and name in source.names():
            return f" Another source has it: make_env({f'{source.prefix}:{name}'!r})."
    return ""
