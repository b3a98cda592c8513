"""Metrics that are reduced on the device: sums and weights, divided once, on the host.

A metric is a small pytree of sums whose structure and dtypes never change. So a dict of metrics can
be a scan carry and can be added over minibatches, updates, actors and devices. The mean of means is
wrong as soon as rows are padded or invalid; a quotient of sums is not.

A training loop merges metrics inside its program, `pack`s them there and reads one array:

    state, total, packed = program(state, total)    # total starts at zeros_like(metrics)
    row = compute(unpack(packed, total))
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.types import Array, Node, PyTree

Metrics = Mapping[str, Any]  # name → Metric, plain array (a mean), or Metrics


class Metric(Node, abc.ABC):
    """One named number in the making. Its leaves are sums: over actors and devices they add.

    Example, the root of a mean square:
      >>> class RootMeanSquare(Metric):
      ...     squares: jax.Array
      ...     count: jax.Array
      ...     def result(self):
      ...         return np.sqrt(self.squares / self.count)
      >>> rms = RootMeanSquare(jnp.float32(9), jnp.int32(1)) + RootMeanSquare(23., 1)
      >>> compute({"rms": rms})
      {'rms': 4.0}
    """

    @abc.abstractmethod
    def result(self) -> np.ndarray | None:
        """The number, from leaves on the host; None: nothing was measured."""

    def __add__(self, other: Self) -> Self:
        """What both measured, `other` after this one."""
        return jax.tree.map(jnp.add, self, other)


class Mean(Metric):
    """Σ w·x and Σ w: the weighted mean of all that was merged.

    Example:
      >>> loss = Mean.of(np.array([1.0, 3.0, 9.0]), weights=np.array([1.0, 1.0, 0.0]))
      >>> compute({"loss": loss + Mean.of(8.0)})
      {'loss': 4.0}
    """

    total: Array  # Σ w·x
    weight: Array  # Σ w

    @classmethod
    def of(cls, values: Array, weights: Array | None = None) -> Mean:
        """The mean of all entries, each with its weight.

        Args:
          values: any shape.
          weights: the same shape; None: 1 each. An entry of weight 0 counts for nothing, even
            where it is not finite.
        """
        values = jnp.asarray(values, jnp.float32)
        w = jnp.asarray(jnp.ones_like(values) if weights is None else weights, jnp.float32)
        if w.shape != values.shape:
            raise ValueError(
                f"weights must have the shape of values, {values.shape}, got {w.shape}. "
                "Use jnp.broadcast_to(weights, values.shape)."
            )
        return cls(jnp.sum(jnp.where(w == 0, 0.0, values * w)), jnp.sum(w))

    def result(self) -> np.ndarray | None:
        """The quotient; None, or NaN in an array, where the weight is 0."""
        total, weight = np.asarray(self.total, np.float64), np.asarray(self.weight, np.float64)
        if not weight.ndim and weight == 0:  # a mean that really is NaN stays visible
            return None
        return np.divide(total, weight, out=np.full(total.shape, np.nan), where=weight != 0)


class Last(Mean):
    """The newest value; over actors, the mean of their newest ones.

    Example:
      >>> compute({"learning_rate": Last.of(3.0) + Last.of(2.0)})
      {'learning_rate': 2.0}
    """

    def __add__(self, other: Any) -> Self:
        """The other, unless it measured nothing."""
        newer = other.weight > 0
        return jax.tree.map(lambda old, new: jnp.where(newer, new, old), self, other)


class Sum(Metric):
    """A count or a total; keeps its dtype.

    Example:
      >>> compute({"episodes": Sum(np.int32(3)) + Sum(np.int32(4))})
      {'episodes': 7}
    """

    total: Array

    def result(self) -> np.ndarray:
        """The total."""
        return np.asarray(self.total)


def as_metrics(metrics: PyTree) -> Any:
    """The same tree with each plain array replaced by the mean of its entries.

    Example:
      >>> compute(as_metrics({"loss": jnp.array([1.0, 3.0]), "steps": Sum(jnp.int32(8))}))
      {'loss': 2.0, 'steps': 8}
    """
    return jax.tree.map(lambda x: x if _is_metric(x) else Mean.of(x), metrics, is_leaf=_is_metric)


def merge(first: Metrics, second: Metrics) -> dict[str, Any]:
    """Two dicts of metrics as one: what `first` measured, then what `second` did.

    Example:
      >>> compute(merge({"loss": Mean.of(1.0)}, {"loss": Mean.of(2.0)}))
      {'loss': 1.5}
    """
    if first.keys() != second.keys():
        different = ", ".join(sorted(first.keys() ^ second.keys()))
        raise ValueError(
            f"merge needs metrics of the same names; only one side has: {different}. "
            "Start the other from zeros_like(metrics)."
        )
    first, second = as_metrics(first), as_metrics(second)
    return jax.tree.map(operator.add, first, second, is_leaf=_is_metric)


def zeros_like(metrics: PyTree) -> Any:
    """Metrics of the same structure that hold nothing: where a scan or a log interval starts.

    Takes arrays, or the shapes that `jax.eval_shape` gives.

    Example:
      >>> compute(zeros_like({"loss": Mean.of(1.0), "episodes": Sum(np.int32(3))}))
      {'episodes': 0}
    """
    shapes = jax.eval_shape(as_metrics, metrics)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def compute(metrics: Metrics) -> dict[str, Any]:
    """The numbers, on the host, after one `jax.device_get` of the whole tree.

    Args:
      metrics: dict of metrics; names of nested dicts are joined by "/". Plain arrays pass through.

    Returns:
      A dict of Python numbers. What was not measured (weight 0) is left out. Metrics with a batch
      shape, such as vmapped seeds, give arrays with NaN where a member measured nothing.

    Example:
      >>> compute({"loss": {"policy": Mean.of(2.0)}, "empty": Mean(jnp.zeros(()), jnp.zeros(()))})
      {'loss/policy': 2.0}
    """
    numbers: dict[str, Any] = {}
    for path, value in jax.tree.leaves_with_path(jax.device_get(metrics), is_leaf=_is_metric):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        number = value.result() if _is_metric(value) else value
        if number is not None:
            numbers[name] = number if np.ndim(number) else np.asarray(number).item()
    return numbers


def pack(metrics: PyTree) -> jax.Array:
    """All leaves as one array of bytes, so that reading them is a single transfer; pure.

    Example:
      >>> metrics = {"loss": Mean.of(0.5), "episodes": Sum(jnp.int32(3))}
      >>> packed = jax.jit(pack)(metrics)
      >>> packed.shape, compute(unpack(packed, metrics))
      ((12,), {'episodes': 3, 'loss': 0.5})
    """
    # Bytes, not floats: a count above 2²⁴ has to arrive as it is.
    parts = [jnp.ravel(x).view(jnp.uint8) for x in jax.tree.leaves(metrics)]
    return jnp.concatenate(parts) if parts else jnp.zeros(0, jnp.uint8)


def unpack(packed: Array, like: PyTree) -> Any:
    """What `pack` packed, as numpy arrays.

    Args:
      packed: what `pack` gave.
      like: the metrics, or their shapes from `jax.eval_shape`.
    """
    data, (shapes, structure) = np.asarray(packed), jax.tree.flatten(like)
    sizes = [x.dtype.itemsize * math.prod(x.shape) for x in shapes]
    if len(data) != sum(sizes):
        raise ValueError(f"like has {sum(sizes)} bytes, but packed has {len(data)}.")
    parts = np.split(data, np.cumsum(sizes, dtype=int)[:-1])
    leaves = [part.view(x.dtype).reshape(x.shape) for part, x in zip(parts, shapes)]
    return jax.tree.unflatten(structure, leaves)


def _is_metric(x: Any) -> bool:
    return isinstance(x, Metric)
