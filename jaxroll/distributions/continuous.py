"""Distributions over real numbers: a Gaussian, and one that is squashed into bounds."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxroll.distributions.base import Distribution
from jaxroll.types import Array

_LOG_2PI = math.log(2 * math.pi)


class DiagonalGaussian(Distribution):
    """Independent normal numbers.

    Example:
      >>> normal = DiagonalGaussian(jnp.zeros((8, 3)), jnp.zeros((8, 3)))
      >>> normal.log_prob(normal.mode()).shape
      (8,)
    """

    mean: Array  # [*batch, *action]
    log_std: Array  # [*batch, *action]
    action_ndim: int = struct.field(pytree_node=False, default=1)  # axes of one action

    def _sum(self, x: Array) -> Array:
        return jnp.sum(x, axis=tuple(range(x.ndim - self.action_ndim, x.ndim)))

    def noise(self, key: jax.Array, prefix: tuple[int, ...] = ()) -> Array:
        """[*prefix, *batch, *action] standard normal."""
        return jax.random.normal(key, (*prefix, *self.mean.shape), self.mean.dtype)

    def sample_with(self, noise: Array) -> Array:
        """Mean + std · noise; differentiable with respect to both."""
        return self.mean + jnp.exp(self.log_std) * noise

    def log_prob(self, action: Array) -> Array:
        """[*batch] log-density."""
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return self._sum(-0.5 * (z * z + _LOG_2PI) - self.log_std)

    def entropy(self) -> Array:
        """Σ log σ + ½ log 2πe."""
        return self._sum(self.log_std + 0.5 * (_LOG_2PI + 1))

    def mode(self) -> Array:
        """The mean."""
        return self.mean

    def kl(self, other: DiagonalGaussian) -> Array:
        """Σ log σ₂/σ₁ + (σ₁² + (μ₁ − μ₂)²) / 2σ₂² − ½."""
        gap = other.log_std - self.log_std
        z = (self.mean - other.mean) * jnp.exp(-other.log_std)
        return self._sum(gap + 0.5 * (jnp.exp(-2 * gap) + z * z - 1))


# Squashed actions stay this far (of half the range) from the bounds: at the bound itself atanh is
# infinite, and within a few float32 steps of it the pre-image is lost to rounding.
_EDGE = 1e-5
# Gauss–Hermite points for the expectation under a normal; `entropy` states the error.
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(16)
_NODE_WEIGHTS = _NODE_WEIGHTS / _NODE_WEIGHTS.sum()


class TanhGaussian(Distribution):
    """Independent normal numbers pressed into (low, high).

        a = low + ½ (high − low) (tanh x + 1),  x ~ N(μ, σ²)

    Actions keep 10⁻⁵ of half the range away from the bounds, in `sample` and in `log_prob` alike:
    so the density of a stored action is finite, and is the same function of it under the policy
    that acted and under the one that learns.

    Example:
      >>> squashed = TanhGaussian(jnp.zeros((8, 1)), jnp.zeros((8, 1)), low=-2.0, high=2.0)
      >>> bool((abs(squashed.sample(jax.random.key(0))) < 2).all())
      True
    """

    mean: Array  # [*batch, *action] of x
    log_std: Array  # [*batch, *action] of x
    low: float | tuple = struct.field(pytree_node=False, default=-1.0)  # a number, or one per entry
    high: float | tuple = struct.field(pytree_node=False, default=1.0)
    action_ndim: int = struct.field(pytree_node=False, default=1)

    @property
    def base(self) -> DiagonalGaussian:
        """The normal distribution of x."""
        return DiagonalGaussian(self.mean, self.log_std, self.action_ndim)

    def _center_and_scale(self) -> tuple[Array, Array]:
        """Middle and half of the range, in the mean's shape."""
        event = self.mean.shape[self.mean.ndim - self.action_ndim :]
        low, high = (np.asarray(x, np.float64) for x in (self.low, self.high))
        low, high = (x.reshape(event) if x.ndim else x for x in (low, high))
        center, scale = (x.astype(self.mean.dtype) for x in ((low + high) / 2, (high - low) / 2))
        shape = self.mean.shape
        return jnp.broadcast_to(center, shape), jnp.broadcast_to(scale, shape)

    def _widened(self) -> TanhGaussian:
        """In float32 at least: near the bounds, and summed, fewer bits are too few."""
        dtype = jnp.promote_types(self.mean.dtype, jnp.float32)
        return self.replace(mean=self.mean.astype(dtype), log_std=self.log_std.astype(dtype))

    def _squash(self, x: Array) -> Array:
        center, scale = self._center_and_scale()
        return center + scale * jnp.clip(jnp.tanh(x), -1 + _EDGE, 1 - _EDGE)

    def noise(self, key: jax.Array, prefix: tuple[int, ...] = ()) -> Array:
        """[*prefix, *batch, *action] standard normal."""
        return self.base.noise(key, prefix)

    def sample_with(self, noise: Array) -> Array:
        """The squashed mean + std · noise."""
        return self._squash(self.base.sample_with(noise))

    def log_prob(self, action: Array) -> Array:
        """[*batch] log-density: log N(x) − Σ log |da/dx|."""
        wide = self._widened()
        center, scale = wide._center_and_scale()
        x = jnp.arctanh(jnp.clip((action - center) / scale, -1 + _EDGE, 1 - _EDGE))
        return wide.base.log_prob(x) - wide.base._sum(_log_slope(x) + jnp.log(scale))

    def entropy(self) -> Array:
        """H(x) + E[log |da/dx|]; there is no closed form.

        The expectation is a 16-point Gauss–Hermite quadrature: deterministic, differentiable,
        within 0.005 nats per entry for σ ≤ 2 and 0.06 for σ ≤ 4, whatever the mean.
        """
        wide = self._widened()
        nodes = jnp.asarray(_NODES, wide.mean.dtype).reshape(-1, *[1] * wide.mean.ndim)
        x = wide.mean[None] + jnp.exp(wide.log_std)[None] * nodes
        weights = jnp.asarray(_NODE_WEIGHTS, wide.mean.dtype).reshape(nodes.shape)
        # Not a dot, which accelerators compute with fewer bits.
        expected = jnp.sum(weights * _log_slope(x), axis=0)
        _, scale = wide._center_and_scale()
        return wide.base.entropy() + wide.base._sum(expected + jnp.log(scale))

    def mode(self) -> Array:
        """The squashed mean of x: the median of the action, not the peak of its density."""
        return self._squash(self.mean)

    def kl(self, other: TanhGaussian) -> Array:
        """That of the normals beneath: the same one-to-one map leaves it unchanged."""
        if (self.low, self.high) != (other.low, other.high):
            raise ValueError(
                "KL needs two TanhGaussians with the same bounds, got "
                f"({self.low}, {self.high}) and ({other.low}, {other.high})."
            )
        return self.base.kl(other.base)


def _log_slope(x: Array) -> Array:
    """log (1 − tanh² x), exact in the tails where 1 − tanh² x rounds to 0."""
    return 2 * (math.log(2.0) - x - jax.nn.softplus(-2 * x))
