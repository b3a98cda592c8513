"""What every distribution over actions can do."""

from __future__ import annotations

import inspect
from typing import Any

import jax

from jaxroll.types import Array, Node


class Distribution(Node):
    """What every distribution can do; subclasses say how."""

    def noise(self, key: jax.Array, prefix: tuple[int, ...] = ()) -> Array:
        """The randomness of one sample per batch element, [*prefix, *batch, ...].

        Only shapes and dtypes of the leaves are read, so `jax.ShapeDtypeStruct` leaves serve too.
        """
        raise NotImplementedError

    def sample_with(self, noise: Array) -> Array:
        """The sample that this noise gives; a deterministic function of both."""
        raise NotImplementedError

    def sample(self, key: jax.Array) -> Array:
        """One action per batch element."""
        return self.sample_with(self.noise(key))

    def log_prob(self, action: Array) -> Array:
        """[*batch] log-probability (or density) of the action."""
        raise NotImplementedError

    def entropy(self) -> Array:
        """[*batch] entropy in nats."""
        raise NotImplementedError

    def mode(self) -> Array:
        """The action to take when acting deterministically."""
        raise NotImplementedError

    def kl(self, other: Any) -> Array:
        """[*batch] KL(self ‖ other), for another of the same kind."""
        raise NotImplementedError


def sample(distribution: Any, key: jax.Array) -> Any:
    """One action per batch element, of a `Distribution` or one of distrax or tfp (`seed=`).

    Example:
      >>> from jaxroll.distributions import Bernoulli
      >>> sample(Bernoulli(jax.numpy.zeros((8, 2))), jax.random.key(0)).shape
      (8, 2)
    """
    if isinstance(distribution, Distribution):
        return distribution.sample(key)
    if "seed" in inspect.signature(distribution.sample).parameters:
        return distribution.sample(seed=key)
    return distribution.sample(key)
