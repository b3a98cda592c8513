"""Metrics that are reduced on the device: sums and weights, divided once, on the host.

A metric is a small pytree of sums whose structure and dtypes never change, so a dict of them can
be a scan carry, can be added over minibatches, updates and actors, and can cross devices. The
mean of means is wrong as soon as rows are padded or invalid; a quotient of sums is not.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.types import Array, Node

Metrics = Mapping[str, Any]  # name → Metric; dicts may be nested


class Metric(Node, abc.ABC):
    """One named number in the making. Leaves have any batch shape; `+` and `merge` are the same."""

    @abc.abstractmethod
    def merge(self, other: Any) -> Any:
        """What both measured, the other after this, in the same structure."""

    @abc.abstractmethod
    def identity(self) -> Any:
        """The metric that changes nothing when merged, with the same shapes and dtypes."""

    @abc.abstractmethod
    def all_reduce(self, axis_name: Any) -> Any:
        """The metric over all members of a mapped axis, the same on each."""

    @abc.abstractmethod
    def result(self) -> np.ndarray:
        """The number on the host; NaN where nothing was measured."""

    def __add__(self, other: Any) -> Any:
        return self.merge(other)


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
        weights = jnp.ones_like(values) if weights is None else jnp.asarray(weights, jnp.float32)
        if weights.shape != values.shape:
            raise ValueError(
                f"weights must have the shape of values, {values.shape}, got {weights.shape}. "
                "Use jnp.broadcast_to(weights, values.shape)."
            )
        total = jnp.sum(jnp.where(weights == 0, 0.0, values * weights))
        return cls(total, jnp.sum(weights))

    def merge(self, other: Mean) -> Mean:
        """Both sums, added."""
        return Mean(self.total + other.total, self.weight + other.weight)

    def identity(self) -> Mean:
        """0 of 0."""
        return Mean(_full_like(self.total, 0), _full_like(self.weight, 0))

    def all_reduce(self, axis_name: Any) -> Mean:
        """Both sums over the axis."""
        return jax.lax.psum(self, axis_name)

    def result(self) -> np.ndarray:
        """The quotient; NaN where the weight is 0."""
        total, weight = np.asarray(self.total, np.float64), np.asarray(self.weight, np.float64)
        return np.divide(total, weight, out=np.full(np.shape(total), np.nan), where=weight != 0)


class Last(Metric):
    """The newest value; over actors, the mean of their newest ones.

    Example:
      >>> compute({"learning_rate": Last.of(3.0) + Last.of(2.0)})
      {'learning_rate': 2.0}
    """

    total: Array
    weight: Array  # 0: nothing measured yet

    @classmethod
    def of(cls, value: Array) -> Last:
        """One value."""
        value = jnp.asarray(value, jnp.float32)
        return cls(value, jnp.ones_like(value))

    def merge(self, other: Last) -> Last:
        """The other, unless it measured nothing."""
        newer = other.weight > 0
        return Last(
            jnp.where(newer, other.total, self.total), jnp.where(newer, other.weight, self.weight)
        )

    def identity(self) -> Last:
        """Nothing measured."""
        return Last(_full_like(self.total, 0), _full_like(self.weight, 0))

    def all_reduce(self, axis_name: Any) -> Last:
        """The mean over the axis."""
        return jax.lax.psum(self, axis_name)

    def result(self) -> np.ndarray:
        """The value; NaN where there is none."""
        return Mean(self.total, self.weight).result()


class Sum(Metric):
    """A count or a total; keeps its dtype.

    Example:
      >>> compute({"episodes": Sum(np.int32(3)) + Sum(np.int32(4))})
      {'episodes': 7}
    """

    total: Array

    def merge(self, other: Sum) -> Sum:
        """The sum of both."""
        return Sum(self.total + other.total)

    def identity(self) -> Sum:
        """0."""
        return Sum(_full_like(self.total, 0))

    def all_reduce(self, axis_name: Any) -> Sum:
        """The sum over the axis."""
        return jax.lax.psum(self, axis_name)

    def result(self) -> np.ndarray:
        """The total."""
        return np.asarray(self.total)


class Max(Metric):
    """The largest value; −∞ (the dtype's smallest) means that nothing was measured.

    Example:
      >>> compute({"lag": Max(np.float32(2)) + Max(np.float32(5))})
      {'lag': 5.0}
    """

    value: Array

    def merge(self, other: Max) -> Max:
        """The larger of both."""
        return Max(jnp.maximum(self.value, other.value))

    def identity(self) -> Max:
        """Smaller than everything."""
        return Max(_full_like(self.value, _smallest(self.value.dtype)))

    def all_reduce(self, axis_name: Any) -> Max:
        """The largest over the axis."""
        return jax.lax.pmax(self, axis_name)

    def result(self) -> np.ndarray:
        """The value; NaN where nothing was measured."""
        value = np.asarray(self.value)
        missing = value == _smallest(value.dtype)
        return np.where(missing, np.nan, value) if missing.any() else value


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
    return {
        name: merge(metric, second[name])
        if isinstance(metric, Mapping)
        else metric.merge(second[name])
        for name, metric in first.items()
    }


def zeros_like(metrics: Any) -> Any:
    """Metrics of the same structure that hold nothing: where a scan or a log interval starts.

    Takes arrays, or the shapes that `jax.eval_shape` gives.

    Example:
      >>> compute(zeros_like({"loss": Mean.of(1.0), "episodes": Sum(np.int32(3))}))
      {'episodes': 0}
    """
    return _map(lambda metric: metric.identity(), metrics)


def reduce(metrics: Any, axis: int = 0) -> Any:
    """Metrics stacked along an axis (by scan, vmap or all_gather), merged in order.

    One after the other, so that the result does not depend on how the axis came about.

    Example:
      >>> stacked = {"loss": Mean(jnp.array([1.0, 6.0]), jnp.array([1.0, 3.0]))}
      >>> compute(reduce(stacked))
      {'loss': 1.75}
    """
    moved = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), metrics)
    first = jax.tree.map(lambda x: x[0], moved)
    rest = jax.tree.map(lambda x: x[1:], moved)
    return jax.lax.scan(lambda carry, x: (_merge(carry, x), None), first, rest)[0]


def all_reduce(metrics: Any, axis_name: Any) -> Any:
    """Metrics over all members of a mapped axis (`psum`; `pmax` for `Max`)."""
    return _map(lambda metric: metric.all_reduce(axis_name), metrics)


def compute(metrics: Metrics) -> dict[str, Any]:
    """The numbers, on the host, after one transfer.

    Args:
      metrics: dict of metrics; names of nested dicts are joined by "/". Plain arrays pass through.

    Returns:
      A dict of Python numbers. What was not measured (weight 0) is left out. Metrics with a batch
      shape, such as vmapped seeds, give arrays with NaN where a member measured nothing.

    Example:
      >>> compute({"loss": {"policy": Mean.of(2.0)}, "empty": Mean(jnp.zeros(()), jnp.zeros(()))})
      {'loss/policy': 2.0}
    """
    host = jax.device_get(metrics)
    numbers: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                visit(f"{prefix}/{name}" if prefix else str(name), inner)
            return
        measured = isinstance(value, Metric)
        number = np.asarray(value.result() if measured else value)
        if number.ndim:
            numbers[prefix] = number
        elif not (measured and _is_missing(value, number)):
            numbers[prefix] = number.item()

    visit("", host)
    return numbers


def _is_missing(metric: Metric, number: np.ndarray) -> bool:
    """Whether NaN means "not measured"; a mean that really is NaN must stay visible."""
    if isinstance(metric, Mean | Last):
        return not np.any(metric.weight)
    return isinstance(metric, Max) and bool(np.isnan(number)) and not np.isnan(metric.value)


def _merge(first: Any, second: Any) -> Any:
    return first.merge(second) if isinstance(first, Metric) else merge(first, second)


def _map(function: Any, metrics: Any) -> Any:
    return jax.tree.map(function, metrics, is_leaf=lambda x: isinstance(x, Metric))


def _full_like(x: Any, fill: Any) -> jax.Array:
    return jnp.full(np.shape(x), fill, x.dtype)


def _smallest(dtype: Any) -> Any:
    if np.dtype(dtype).kind in "iu":
        return np.iinfo(dtype).min
    return -np.inf
