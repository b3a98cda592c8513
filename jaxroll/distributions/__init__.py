"""Distributions over actions, as pytrees: they can be returned from jit, scanned and vmapped.

A distribution has any leading batch axes ([B], [N], [T, B] …) on every leaf, then the axes of one
action. `log_prob`, `entropy` and `kl` reduce over the action and keep the batch axes.

Sampling is split in two: `noise` draws all the randomness, from shapes alone, and `sample_with`
turns it into actions. So a collector draws the noise of a whole rollout at once,
`noise(key, (T,))`, and spends one row per step; `sample(key)` is `sample_with(noise(key))`.
"""

from jaxroll.distributions.base import Distribution, sample
from jaxroll.distributions.continuous import DiagonalGaussian, TanhGaussian
from jaxroll.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from jaxroll.distributions.fitting import DistributionFor, distribution_for

__all__ = [
    "Bernoulli",
    "Categorical",
    "DiagonalGaussian",
    "Distribution",
    "DistributionFor",
    "MultiCategorical",
    "TanhGaussian",
    "distribution_for",
    "sample",
]
