"""Small helpers of the sources: options that compare by value, errors that suggest a name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
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


def attempt(name: str, options: Mapping[str, Any], function: Callable[[], Any]) -> Any:
    """The function's result; what goes wrong in a source is a `ValueError` about its options."""
    try:
        return function()
    except Exception as error:
        raise unusable(name, options, error) from error


def unusable(name: str, options: Mapping[str, Any], error: Exception) -> ValueError:
    """The error for options with which a source cannot make an environment."""
    given = ", ".join(f"{k}={v!r}" for k, v in options.items())
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(f"{name} cannot be made with {given}: {reason}")


def check_option(env: str, name: str, value: Any, default: Any, at_least: int = 0) -> None:
    """Raise if an option is not of its default's kind; a default of None says nothing.

    Whole numbers and limits of time are counted from `at_least` on.
    """
    kind = _kind(default)
    if kind is None:
        return
    rule, is_right = _RULES[kind]
    if not is_right(value, default):
        shape = f" of shape {np.shape(default)}" if kind == "array" else ""
        raise _wrong(value)(f"{name} of {env} must be {rule}{shape}, got {value!r}.")
    if (kind == "int" or (kind == "float" and at_least)) and not at_least <= value < 2**31:
        raise ValueError(f"{name} of {env} must be from {at_least} to 2**31 - 1, got {value!r}.")


def _kind(default: Any) -> str | None:
    if default is None or isinstance(default, list | tuple | dict):
        return None
    if isinstance(default, str):
        return "str"
    array = np.asarray(default)
    if array.ndim:
        return "array" if array.dtype.kind in "biuf" else None
    return {"b": "bool", "i": "int", "u": "int", "f": "float"}.get(array.dtype.kind)


def _is_number(value: Any, kinds: str) -> bool:
    return isinstance(value, bool | int | float | np.generic) and np.asarray(value).dtype.kind in (
        kinds
    )


def _wrong(value: Any) -> type[Exception]:
    return ValueError if _is_number(value, "iuf") else TypeError


_RULES = {
    "str": ("a string", lambda x, _: isinstance(x, str)),
    "bool": ("true or false", lambda x, _: _is_number(x, "b")),
    "int": ("a whole number", lambda x, _: _is_number(x, "iu")),
    "float": ("a finite number", lambda x, _: _is_number(x, "iuf") and np.isfinite(float(x))),
    "array": ("an array of finite numbers", lambda x, y: _fits(x, y)),
}


def _fits(value: Any, default: Any) -> bool:
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return False
    is_right = array.dtype.kind in "biuf" and array.shape == np.shape(default)
    return bool(is_right and np.isfinite(array).all())


def suggestion(name: str, names: Iterable[str], count: int = 3) -> str:
    """The question "Did you mean …?" with the names most like this one, or nothing."""
    names = list(names)
    lower = {n.lower(): n for n in names}
    near = difflib.get_close_matches(name.lower(), list(lower), count, cutoff=0.7)
    # A name without its version or suite is further away than most typing mistakes.
    near += [n for n in lower if name and n.startswith(name.lower()) and n not in near]
    return f" Did you mean {', '.join(repr(lower[n]) for n in near[:count])}?" if near else ""
