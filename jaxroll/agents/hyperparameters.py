"""One definition of each hyperparameter: it serves class, config, command line and help.

A hyperparameter is a field of the agent with a default, a sentence of help and a rule. If it enters
a formula it is an array leaf (changed, scheduled or vmapped with no recompilation); if it selects
another program it is static and compares by value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from flax import struct

from jaxroll.checks import unknown_name
from jaxroll.types import as_leaf

_RULES = {
    "> 0": lambda x: x > 0,
    ">= 0": lambda x: x >= 0,
    ">= 1": lambda x: x >= 1,
    "in [0, 1]": lambda x: (x >= 0) & (x <= 1),
}


def leaf(
    default: float | None, help: str, rule: str | None = None, none: float | None = None
) -> Any:
    """A number that enters a formula: an array leaf of the agent.

    Args:
      default: its value.
      help: one sentence.
      rule: one of "> 0", ">= 0", ">= 1", "in [0, 1]".
      none: what None stands for, such as infinity, which no other may be; None: it may not be
        None.

    Example:
      >>> from jaxroll.types import Node
      >>> class Rule(Node):
      ...     step_size: float = leaf(0.1, "of each update", "> 0")
      >>> hyperparameters_of(Rule)["step_size"].check(-1)
      Traceback (most recent call last):
        ...
      ValueError: step_size must be > 0, got -1.0.
    """
    metadata = {"help": help, "rule": rule, "none": none, "static": False}
    return struct.field(default=default, metadata={"hyperparameter": metadata})


def static(default: Any, help: str, rule: str | None = None, choices: tuple[Any, ...] = ()) -> Any:
    """A choice or a size: it selects another program, so changing it compiles anew.

    Args:
      default: its value; its type is the expected one (None: anything).
      help: one sentence.
      rule: as for `leaf`.
      choices: the allowed values, if they are few.

    Example:
      >>> from jaxroll.types import Node
      >>> class Rule(Node):
      ...     order: str = static("random", "of the rows", choices=("random", "given"))
      >>> jax.tree.leaves(Rule()), hyperparameters_of(Rule)["order"].is_static
      ([], True)
    """
    metadata = {"help": help, "rule": rule, "choices": choices, "static": True}
    return struct.field(pytree_node=False, default=default, metadata={"hyperparameter": metadata})


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

    def check(self, value: Any) -> Any:
        """The value as the field stores it, or an error that names the rule."""
        if self.is_static:
            return self._check_static(value)
        if value is None:
            if self.none is None:
                raise ValueError(f"{self.name} must be a number, got None.")
            value = self.none
        if isinstance(value, str | bytes | bool):
            raise TypeError(f"{self.name} must be a number, got {value!r}.")
        value = as_leaf(float(value) if isinstance(value, int) else value)
        if not isinstance(value, jax.core.Tracer):
            numbers = np.asarray(value)
            if numbers.dtype.kind not in "fiu":
                raise TypeError(f"{self.name} must be a number, got {value!r}.")
            self._check_rule(numbers)
            self._check_finite(numbers)
        return value

    def _check_static(self, value: Any) -> Any:
        if not isinstance(value, str | bytes) and isinstance(value, Sequence):
            value = tuple(value)
        if self.choices and value not in self.choices:
            options = ", ".join(repr(c) for c in self.choices)
            raise ValueError(f"{self.name} must be one of {options}, got {value!r}.")
        kind = type(self.default)
        if isinstance(self.default, int) and not self.choices:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, np.integer):
                value = int(value)
            if type(value) is not kind:
                raise TypeError(f"{self.name} must be of type {kind.__name__}, got {value!r}.")
            if int(value) >= 2**31:  # what a size of an array, or a count on a device, can be
                raise ValueError(f"{self.name} must be below 2**31, got {value}.")
        if self.rule is not None and value is not None:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{self.name} must be an integer or None, got {value!r}.")
            self._check_rule(np.asarray(value))
        return value

    def _check_rule(self, value: np.ndarray) -> None:
        if np.isnan(value).any():
            raise ValueError(f"{self.name} must be a number, got nan.")
        if self.rule is not None and not _RULES[self.rule](value).all():
            shown = value.item() if value.ndim == 0 else value.tolist()
            raise ValueError(f"{self.name} must be {self.rule}, got {shown}.")

    def _check_finite(self, value: np.ndarray) -> None:
        infinite = np.isinf(value)
        if infinite.any() and not (self.none is not None and np.isinf(self.none)):
            shown = value.item() if value.ndim == 0 else value.tolist()
            raise ValueError(f"{self.name} must be finite, got {shown}.")


def hyperparameters_of(cls: type) -> dict[str, Hyperparameter]:
    """All hyperparameters of an agent class, in the order of their definition."""
    found = {}
    for field in dataclasses.fields(cls):
        info = field.metadata.get("hyperparameter")
        if info is not None:
            found[field.name] = Hyperparameter(
                name=field.name,
                default=field.default,
                help=info["help"],
                rule=info["rule"],
                is_static=info["static"],
                choices=info.get("choices", ()),
                none=info.get("none"),
            )
    return found


def resolve(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    """Field values from what was given and the defaults; unknown names are errors."""
    known = hyperparameters_of(cls)
    for name in given:
        if name not in known:
            raise TypeError(unknown_name("hyperparameter", name, known, cls.__name__))
    return {name: h.check(given.get(name, h.default)) for name, h in known.items()}
