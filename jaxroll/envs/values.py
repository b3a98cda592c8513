"""Small helpers of the sources: options that compare by value, errors that suggest a name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np


class UnknownNameError(ValueError):
    """A source has no environment of this name; another may have."""


@dataclasses.dataclass(frozen=True)
class _FrozenArray:
    shape: tuple[int, ...]
    dtype: str
    data: bytes

    def thaw(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Options:
    """A mapping of options that is hashable and compares by value, arrays included.

    Example:
      >>> Options.create({"a": np.arange(2)}) == Options.create({"a": np.arange(2)})
      True
      >>> Options.create({"a": 1}) == Options.create({"a": True})
      False
    """

    items: tuple[tuple[str, type, Any], ...] = ()

    @classmethod
    def create(cls, options: Mapping[str, Any]) -> Options:
        """Options from a mapping; a value that is neither hashable nor an array is an error."""
        return cls(tuple((k, type(v), _freeze(k, v)) for k, v in sorted(options.items())))

    def as_dict(self) -> dict[str, Any]:
        """The options as they were given, arrays as numpy's."""
        return {name: _thaw(value) for name, _, value in self.items}


def _freeze(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        return _FrozenArray(array.shape, array.dtype.str, array.tobytes())
    if isinstance(value, list | tuple):
        return type(value) is list, tuple(_freeze(name, v) for v in value)
    if isinstance(value, dict):
        return Options.create(value)
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"The option {name} must be hashable or an array, got {type(value).__name__}: "
            "environments are compared by their options."
        ) from error
    return value


def _thaw(value: Any) -> Any:
    if isinstance(value, _FrozenArray):
        return value.thaw()
    if isinstance(value, Options):
        return value.as_dict()
    if isinstance(value, tuple):
        is_list, items = value
        return (list if is_list else tuple)(_thaw(v) for v in items)
    return value


def suggestion(name: str, names: Iterable[str], count: int = 3) -> str:
    """The question "Did you mean …?" with the names most like this one, or nothing."""
    names = list(names)
    lower = {n.lower(): n for n in names}
    near = difflib.get_close_matches(name.lower(), list(lower), count, cutoff=0.7)
    # A name without its version or suite is further away than most typing mistakes.
    near += [n for n in lower if name and n.startswith(name.lower()) and n not in near]
    return f" Did you mean {', '.join(repr(lower[n]) for n in near[:count])}?" if near else ""
