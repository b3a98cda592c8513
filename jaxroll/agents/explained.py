"""How much of the returns the values explain: a metric whose sums add over actors and updates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import losses
from jaxroll.reporting.metrics import Metric


class ExplainedVariance(Metric):
    """1 − Var(returns − values) / Var(returns), of all rows that were merged."""

    sums: losses.ExplainedVarianceSums

    def merge(self, other: Any) -> Any:
        """The moments of both, added."""
        return ExplainedVariance(jax.tree.map(jnp.add, self.sums, other.sums))

    def identity(self) -> Any:
        """No rows."""
        return ExplainedVariance(jax.tree.map(lambda x: jnp.zeros(np.shape(x), x.dtype), self.sums))

    def all_reduce(self, axis_name: Any) -> Any:
        """The moments over the axis."""
        return jax.lax.psum(self, axis_name)

    def result(self) -> np.ndarray:
        """The number; NaN where the returns do not vary."""
        with np.errstate(divide="ignore", invalid="ignore"):
            s = jax.tree.map(lambda x: np.asarray(x, np.float64), self.sums)
            spread = s.returns_squared / s.weight - (s.returns / s.weight) ** 2
            left = s.errors_squared / s.weight - (s.errors / s.weight) ** 2
            return np.where(spread > 0, 1 - left / spread, np.nan)
