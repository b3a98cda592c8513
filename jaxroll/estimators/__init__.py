"""Formulas over time: arrays in, arrays out, time-major [T, B], one truncation contract."""

from jaxroll.estimators.gae import gae, lambda_returns
from jaxroll.estimators.normalize import normalize
from jaxroll.estimators.retrace import retrace
from jaxroll.estimators.returns import discounted_returns, n_step_returns
from jaxroll.estimators.vtrace import vtrace

__all__ = [
    "discounted_returns",
    "gae",
    "lambda_returns",
    "n_step_returns",
    "normalize",
    "retrace",
    "vtrace",
]
