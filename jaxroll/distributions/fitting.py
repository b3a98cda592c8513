"""Which distribution fits an action space, and how a network's numbers become one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxroll import spaces
from jaxroll.distributions.base import Distribution
from jaxroll.distributions.continuous import DiagonalGaussian, TanhGaussian
from jaxroll.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from jaxroll.types import Array


@dataclasses.dataclass(frozen=True)
class DistributionFor:
    """How a network's numbers become a distribution over an action space; compares by value.

    Made by `distribution_for`.
    """

    space: Any
    squash: bool = False

    @property
    def num_outputs(self) -> int:
        """How many numbers per row `build` needs."""
        match self.space:
            case spaces.Discrete(n=n):
                return n
            case spaces.MultiDiscrete(nvec=nvec):
                return sum(nvec)
        return spaces.flat_size(self.space)

    @property
    def has_log_std(self) -> bool:
        """Whether `build` needs a log standard deviation as well."""
        return isinstance(self.space, spaces.Box)

    def build(
        self, outputs: Array, log_std: Array | None = None, mask: Array | None = None
    ) -> Distribution:
        """The distribution.

        Args:
          outputs: [..., num_outputs].
          log_std: [..., num_outputs] or [num_outputs]; for a Box only.
          mask: [..., num_outputs] bool, true where allowed; for Discrete and MultiDiscrete only.
        """
        match self.space:
            case spaces.Discrete():
                return Categorical.create(outputs, mask)
            case spaces.MultiDiscrete(nvec=nvec):
                return MultiCategorical.create(outputs, nvec, mask)
        if mask is not None:
            raise ValueError(
                f"an action mask needs a Discrete or MultiDiscrete action space, got {self.space}. "
                'Rename the "action_mask" entry of the observation if it is not one.'
            )
        if isinstance(self.space, spaces.MultiBinary):
            return Bernoulli(outputs)
        if log_std is None:
            raise ValueError(f"a distribution over {self.space} needs log_std.")
        spread = jnp.broadcast_to(jnp.asarray(log_std, outputs.dtype), outputs.shape)
        shape, ndim = (*outputs.shape[:-1], *self.space.shape), len(self.space.shape)
        mean, spread = outputs.reshape(shape), spread.reshape(shape)
        if self.squash:
            return TanhGaussian(mean, spread, self.space.low, self.space.high, ndim)
        return DiagonalGaussian(mean, spread, ndim)


def distribution_for(action_space: spaces.Space, *, squash: bool = False) -> DistributionFor:
    """The kind of distribution that fits an action space.

    Discrete → `Categorical`, MultiDiscrete → `MultiCategorical`, MultiBinary → `Bernoulli`,
    Box → `DiagonalGaussian` or, with `squash`, `TanhGaussian` within the bounds.

    A DiagonalGaussian ignores bounds: its samples are stored as drawn, with their own
    log-probability, and it is for the environment to clip them.

    Example:
      >>> kind = distribution_for(spaces.MultiDiscrete((2, 3)))
      >>> kind.num_outputs, type(kind.build(jnp.zeros((8, 5)))).__name__
      (5, 'MultiCategorical')
    """
    is_box = isinstance(action_space, spaces.Box)
    choices = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    if not is_box and not isinstance(action_space, choices):
        raise ValueError(
            "an action space must be Discrete, MultiDiscrete, MultiBinary or Box, "
            f"got {action_space!r}. Flatten it in a wrapper of the environment."
        )
    if is_box and np.dtype(action_space.dtype).kind != "f":
        raise ValueError(
            f"a Box action space must hold floats, got {np.dtype(action_space.dtype)}. "
            "Describe integer actions as MultiDiscrete(nvec)."
        )
    if squash and not (is_box and action_space.is_bounded):
        raise ValueError(
            f"squash=True is for Box action spaces with two finite bounds, got {action_space}. "
            "Use squash=False."
        )
    return DistributionFor(action_space, squash)
