"""One definition of each hyperparameter: it serves class, config, command line and help.

A hyperparameter is a field of the agent with a default, a sentence of help and a rule. If it enters
a formula it is an array leaf (changed, scheduled or vmapped with no recompilation); if it selects
another program it is static and compares by value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

from jaxroll.checks import (
    RULES,
    check_choice,
    check_count,
    check_flag,
    check_number,
    unknown_name,
)


def leaf(
    default: float | None,
    help: str,
    rule: str | None = None,
    none: float | None = None,
    streams: bool = False,
) -> Any:
    """A number that enters a formula: an array leaf of the agent.

    Args:
      default: its value.
      help: one sentence.
      rule: one of "> 0", ">= 0", ">= 1", "in [0, 1]".
      none: what None stands for, such as infinity, which no other may be; None: it may not be
        None.
      streams: whether it may be a dict with a number for each stream of values.

    Example:
      >>> from jaxroll.types import Node
      >>> class Rule(Node):
      ...     step_size: float = leaf(0.1, "of each update", "> 0")
      >>> hyperparameters_of(Rule)["step_size"].check(-1)
      Traceback (most recent call last):
        ...
      ValueError: step_size must be > 0, got -1.0.
    """
    return _field(False, default=default, help=help, rule=rule, none=none, streams=streams)


def static(default: Any, help: str, rule: str | None = None, choices: tuple[Any, ...] = ()) -> Any:
    """A choice or a size: it selects another program, so changing it compiles anew.

    Args:
      default: its value; its type is the expected one (None: anything).
      help: one sentence.
      rule: as for `leaf`: the value is a count, or None where that is the default.
      choices: the allowed values, if they are few.

    Example:
      >>> import jax
      >>> from jaxroll.types import Node
      >>> class Rule(Node):
      ...     order: str = static("random", "of the rows", choices=("random", "given"))
      >>> jax.tree.leaves(Rule()), hyperparameters_of(Rule)["order"].is_static
      ([], True)
    """
    return _field(True, default=default, help=help, rule=rule, choices=choices)


def _field(is_static: bool, *, default: Any, rule: str | None, **info: Any) -> Any:
    check_choice("rule", rule, (None, *RULES))
    metadata = {"hyperparameter": {"rule": rule, "is_static": is_static, **info}}
    return struct.field(pytree_node=not is_static, default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """What is known about one: for config files, the command line and its help."""

    name: str
    default: Any
    help: str
    rule: str | None
    is_static: bool
    choices: tuple[Any, ...] = ()
    none: float | None = None
    streams: bool = False

    def check(self, value: Any) -> Any:
        """The value as the field stores it, or an error that names the rule."""
        if self.is_static:
            return self._check_static(value)
        if not isinstance(value, dict) or not self.streams:
            return self._check_number(self.name, value)
        if not value or not all(isinstance(stream, str) for stream in value):
            raise ValueError(
                f"{self.name} must be a number, or a dict with one for each stream of values, got "
                f"{value!r}."
            )
        return {k: self._check_number(f"{self.name}[{k!r}]", x) for k, x in value.items()}

    def _check_number(self, name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            raise TypeError(
                f"{name} must be a number, got {value!r}. To try several values, use "
                f"jaxroll.sweep(agent, n, hyperparameters={{{name!r}: [a, b]}})."
            )
        if value is None and self.none is not None:
            value = self.none
        finite = self.none is None or not np.isinf(self.none)
        check_number(name, value, self.rule, finite=finite, shape=None)
        is_numpy = isinstance(value, int | float | np.ndarray | np.generic)
        return np.asarray(value, np.float32) if is_numpy else value

    def _check_static(self, value: Any) -> Any:
        if self.choices:
            return check_choice(self.name, value, self.choices)
        if isinstance(self.default, bool):
            return check_flag(self.name, value)
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return tuple(check_count(f"{self.name}[{i}]", n) for i, n in enumerate(value))
        if self.rule is None or value is self.default is None:
            return value
        return check_count(self.name, value, at_least=0 if self.rule == ">= 0" else 1)


def hyperparameters_of(cls: type) -> dict[str, Hyperparameter]:
    """All hyperparameters of an agent class, in the order of their definition."""
    return {
        field.name: Hyperparameter(field.name, field.default, **field.metadata["hyperparameter"])
        for field in dataclasses.fields(cls)
        if "hyperparameter" in field.metadata
    }


def resolve(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    """Field values from what was given and the defaults; unknown names are errors."""
    known = hyperparameters_of(cls)
    for name in given:
        if name not in known:
            raise TypeError(unknown_name("hyperparameter", name, known, cls.__name__))
    return {name: h.check(given.get(name, h.default)) for name, h in known.items()}
