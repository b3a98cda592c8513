"""Options of environments: compared by value, given to the source, whose errors are explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxroll.checks import check_array, check_count, check_flag, check_number


class UnknownNameError(ValueError):
    """A source has no environment of this name; another may have."""


class Options:
    """A mapping of options that is hashable and compares by value, arrays included.

    Example:
      >>> Options({"a": np.arange(2)}) == Options({"a": np.arange(2)})
      True
      >>> Options({"a": 1}) == Options({"a": True})
      False
    """

    def __init__(self, values: Mapping[str, Any] | None = None):
        leaves, structure = jax.tree.flatten(dict(values or {}))
        self._leaves = [np.array(x) if _is_array(x) else x for x in leaves]
        self._structure = structure
        self._key = structure, tuple(map(_leaf_key, self._leaves))
        try:
            hash(self._key)
        except TypeError as error:
            raise TypeError(
                f"options must be hashable or arrays, got {values!r}: environments are compared by "
                "their options."
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """The options as they were given, arrays as numpy's."""
        return jax.tree.unflatten(self._structure, self._leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Options({self.as_dict()})"


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | jax.Array)


def _leaf_key(x: Any) -> Any:
    return (x.shape, x.dtype.str, x.tobytes()) if _is_array(x) else (type(x), x)


def attempt(name: str, options: Mapping[str, Any], function: Callable[[], Any]) -> Any:
    """The function's result; an exception of the source becomes one that names the options."""
    try:
        return function()
    except Exception as error:
        if not options or isinstance(error, ImportError):
            raise
        given = ", ".join(f"{k}={v!r}" for k, v in options.items())
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} cannot be made with {given}: {reason}") from error


def check_like(name: str, value: Any, default: Any, *, is_size: bool) -> None:
    """Raise if an option is not of its default's kind, where that is a number, flag or array.

    A size, or a limit of time, is at least 1.
    """
    if isinstance(default, bool | np.bool_):
        check_flag(name, value)
    elif isinstance(default, int | np.integer):
        check_count(name, value, at_least=1 if is_size else 0)
    elif isinstance(default, float | np.floating):
        check_number(name, value, ">= 1" if is_size else None)
    elif _is_array(default):
        array = check_array(name, value)
        if array.shape != default.shape or not np.isfinite(np.asarray(array)).all():
            raise ValueError(
                f"{name} must be finite numbers of shape {default.shape}, got {value!r}."
            )
