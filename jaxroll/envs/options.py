"""Options of environments: compared by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


class Options:
    """A mapping of options that is hashable and compares by value, arrays included.

    Example:
      >>> Options({"a": np.arange(2)}) == Options({"a": np.arange(2)})
      True
      >>> Options({"a": 1}) == Options({"a": True})
      False
    """

    def __init__(self, values: Mapping[str, Any] | None = None):
        def key(x: Any) -> Any:
            is_array = isinstance(x, np.ndarray)
            return (x.shape, x.dtype.str, x.tobytes()) if is_array else (type(x), x)

        leaves, self._structure = jax.tree.flatten(dict(values or {}))
        arrays = np.ndarray | jax.Array
        self._leaves = [np.array(x) if isinstance(x, arrays) else x for x in leaves]
        self._key = self._structure, tuple(map(key, self._leaves))
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
