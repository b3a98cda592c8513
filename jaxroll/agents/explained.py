"""How much of the returns the values explain: a metric whose sums add over actors and updates."""

from __future__ import annotations

import jax
import numpy as np

from jaxroll import losses
from jaxroll.metrics import Metric


class ExplainedVariance(Metric):
    """1 − Var(returns − values) / Var(returns), of all rows that were merged."""

    sums: losses.ExplainedVarianceSums

    def result(self) -> np.ndarray:
        """The number; NaN where the returns do not vary."""
        with np.errstate(divide="ignore", invalid="ignore"):
            s = jax.tree.map(lambda x: np.asarray(x, np.float64), self.sums)
            spread = s.returns_squared / s.weight - (s.returns / s.weight) ** 2
            left = s.errors_squared / s.weight - (s.errors / s.weight) ** 2
            return np.where(spread > 0, 1 - left / spread, np.nan)
