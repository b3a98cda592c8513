"""What an environment shows and accepts, as small values that compare and hash by content.

Sources (gymnax, Gymnasium, …) translate their own spaces into these, so that networks,
distributions and checks know one kind only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.checks import check_array, check_count


class _Choices:
    """Integers from 0 on; a subclass says how many choices each entry has."""

    dtype: Any
    shape: Any
    sizes: Any  # int, or a tuple of ints: the number of choices of each entry

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """(lowest, highest) as arrays of the space's shape."""
        return np.zeros(self.shape, int), np.broadcast_to(np.asarray(self.sizes) - 1, self.shape)

    def contains(self, x: Any) -> bool:
        """Whether x (with any leading axes) has the shape, and every entry is a choice."""
        x = np.asarray(x)
        return x.dtype.kind in "iub" and _is_within(self, x)

    def sample(self, key: jax.Array) -> jax.Array:
        """A uniform choice for each entry."""
        sizes = jnp.asarray(self.sizes, jnp.int32)
        return jax.random.randint(key, self.shape, 0, sizes, jnp.int32).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Discrete(_Choices):
    """One of `n` choices: 0 … n − 1.

    Example:
      >>> Discrete(4).shape, Discrete(4).contains(4)
      ((), False)
    """

    n: int
    dtype: Any = np.dtype("int32")

    shape = ()
    sizes = property(lambda self: self.n)

    def __post_init__(self):
        object.__setattr__(self, "n", check_count("n of Discrete", self.n))


@dataclasses.dataclass(frozen=True)
class MultiDiscrete(_Choices):
    """Several choices at once: entry i is one of `nvec[i]`."""

    nvec: tuple[int, ...]
    dtype: Any = np.dtype("int32")

    shape = property(lambda self: (len(self.nvec),))
    sizes = property(lambda self: self.nvec)

    def __post_init__(self):
        if np.ndim(self.nvec) != 1:
            raise ValueError(f"nvec of MultiDiscrete must be a list of counts, got {self.nvec!r}.")
        nvec = tuple(check_count("an entry of nvec", n) for n in self.nvec)
        object.__setattr__(self, "nvec", nvec)


@dataclasses.dataclass(frozen=True)
class MultiBinary(_Choices):
    """`n` switches, each 0 or 1."""

    n: int
    dtype: Any = np.dtype("int32")

    shape = property(lambda self: (self.n,))
    sizes = 2

    def __post_init__(self):
        object.__setattr__(self, "n", check_count("n of MultiBinary", self.n))


@dataclasses.dataclass(frozen=True)
class Box:
    """Arrays of `shape` between `low` and `high`, given as numbers or arrays.

    A bound that is the same everywhere is kept as a number, any other as a flat tuple, so that
    boxes compare and hash by content. `Box.create` is the same.

    Example:
      >>> Box(-1.0, 1.0, (2,)).is_bounded
      True
      >>> Box(np.zeros(3), np.array([1.0, 2.0, 3.0])).high
      (1.0, 2.0, 3.0)
    """

    low: Any  # float, or a tuple of floats
    high: Any
    shape: Any = None  # tuple of ints; None: that of low
    dtype: Any = np.dtype("float32")

    def __post_init__(self):
        shape = np.shape(self.low) if self.shape is None else self.shape
        if not isinstance(shape, tuple | list | np.ndarray):
            raise TypeError(f"shape of a Box must be a tuple of sizes, got {shape!r}.")
        shape = tuple(check_count("an entry of the shape of a Box", n) for n in shape)
        bounds = {}
        for name in ("low", "high"):
            given = getattr(self, name)
            bound = np.asarray(check_array(f"{name} of a Box", given))
            if bound.dtype == bool or np.isnan(bound.astype(np.float64)).any():
                raise ValueError(f"{name} of a Box must be numbers, got {given!r}.")
            if bound.size not in (1, math.prod(shape)):
                raise ValueError(
                    f"{name} of a Box must be a number or have its shape {shape}, got "
                    f"{bound.shape}."
                )
            flat = bound.astype(np.float64).ravel().tolist()
            bounds[name] = flat[0] if len(set(flat)) == 1 else tuple(flat)
        if (np.asarray(bounds["low"]) > np.asarray(bounds["high"])).any():
            raise ValueError(
                f"low of a Box must not be above high, got {self.low} and {self.high}."
            )
        for name, value in (("shape", shape), ("dtype", np.dtype(self.dtype)), *bounds.items()):
            object.__setattr__(self, name, value)

    @classmethod
    def create(cls, low: Any, high: Any, shape: Any = None, dtype: Any = np.float32) -> Box:
        """The same as `Box(low, high, shape, dtype)`."""
        return cls(low, high, shape, dtype)

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """(low, high) as arrays of the space's shape."""

        def expand(bound: Any) -> np.ndarray:
            x = np.asarray(bound)
            return np.broadcast_to(x if x.ndim == 0 else x.reshape(self.shape), self.shape)

        return expand(self.low), expand(self.high)

    @property
    def is_bounded(self) -> bool:
        """Whether every entry has two bounds that a float32 can tell from infinity."""
        low, high = self.bounds()
        limit = float(np.finfo(np.float32).max) / 2
        return bool((np.abs(low) < limit).all() and (np.abs(high) < limit).all())

    def contains(self, x: Any) -> bool:
        """Whether x (with any leading axes) has the shape and lies within the bounds."""
        return _is_within(self, np.asarray(x))

    def sample(self, key: jax.Array) -> jax.Array:
        """Uniform within the bounds; standard normal where a side is unbounded."""
        low, high = self.bounds()
        if not self.is_bounded:
            return jax.random.normal(key, self.shape).astype(self.dtype)
        if np.dtype(self.dtype).kind in "iu":
            low, high = low.astype(int), high.astype(int) + 1
            return jax.random.randint(key, self.shape, low, high).astype(self.dtype)
        return jax.random.uniform(key, self.shape, jnp.float32, low, high).astype(self.dtype)


def _is_within(space: Any, x: np.ndarray) -> bool:
    low, high = space.bounds()
    fits = x.ndim >= len(space.shape) and x.shape[x.ndim - len(space.shape) :] == space.shape
    return bool(fits and (x >= low).all() and (x <= high).all())


@dataclasses.dataclass(frozen=True)
class Dict:
    """Named spaces; observations are dicts of the same keys. `Dict.create` is the same.

    Example:
      >>> Dict({"b": Discrete(2), "a": Discrete(3)}).spaces["a"]
      Discrete(n=3, dtype=dtype('int32'))
    """

    items: Any  # a mapping, kept as sorted pairs: tuple[tuple[str, Space], ...]

    def __post_init__(self):
        try:
            named = dict(self.items)
        except (TypeError, ValueError):
            raise TypeError(f"Dict needs a mapping of spaces, got {self.items!r}.") from None
        for name, space in named.items():
            if not isinstance(name, str) or not isinstance(space, Space):
                raise TypeError(
                    f"Dict needs names and spaces of jaxroll.spaces, got {name!r}: {space!r}."
                )
        object.__setattr__(self, "items", tuple(sorted(named.items())))

    @classmethod
    def create(cls, spaces: Mapping[str, Any]) -> Dict:
        """The same as `Dict(spaces)`."""
        return cls(spaces)

    @property
    def spaces(self) -> dict[str, Any]:
        """The named spaces."""
        return dict(self.items)

    def contains(self, x: Any) -> bool:
        """Whether x has just these keys, each within its space."""
        return x.keys() == self.spaces.keys() and all(s.contains(x[k]) for k, s in self.items)

    def sample(self, key: jax.Array) -> dict[str, jax.Array]:
        """A sample of each space."""
        keys = jax.random.split(key, max(1, len(self.items)))
        return {name: space.sample(k) for (name, space), k in zip(self.items, keys)}


Space = Discrete | MultiDiscrete | MultiBinary | Box | Dict


def zeros(space: Space, batch_shape: tuple[int, ...] = ()) -> Any:
    """An all-zero member with leading axes, as numpy arrays: an example for `create` and `init`.

    Example:
      >>> zeros(Box.create(0, 255, (84, 84, 4), np.uint8), (8,)).shape
      (8, 84, 84, 4)
    """
    if isinstance(space, Dict):
        return {name: zeros(sub, batch_shape) for name, sub in space.items}
    return np.zeros((*batch_shape, *space.shape), space.dtype)


def shows_alike(space: Space, other: Space) -> bool:
    """Whether a policy for observations of one space can look at those of the other.

    All but the bounds of a `Box` must be the same: sources write infinity in several ways.

    Example:
      >>> shows_alike(Box.create(-1, 1, (4,)), Box.create(-np.inf, np.inf, (4,)))
      True
      >>> shows_alike(Box.create(-1, 1, (4,)), Box.create(-1, 1, (3,)))
      False
    """
    if isinstance(space, Dict) and isinstance(other, Dict):
        parts, others = space.spaces, other.spaces
        return parts.keys() == others.keys() and all(
            shows_alike(parts[k], others[k]) for k in parts
        )
    if isinstance(space, Box) and isinstance(other, Box):
        return (space.shape, space.dtype) == (other.shape, other.dtype)
    return space == other


def flat_size(space: Space) -> int:
    """How many numbers a member has."""
    if isinstance(space, Dict):
        return sum(flat_size(sub) for _, sub in space.items)
    return math.prod(space.shape)
