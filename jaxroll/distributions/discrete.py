"""Distributions over choices: one of n, one of each of several, or flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.distributions.base import Distribution
from jaxroll.types import Array

# Up to here the cumulative sum over choices is unrolled: 1.1–2 × faster than jnp.cumsum on a CPU.
_MAX_UNROLLED = 32


class Categorical(Distribution):
    """One of n choices; p = softmax(logits).

    Example:
      >>> coin = Categorical(jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5]])))
      >>> coin.mode(), coin.entropy().shape
      (Array([1, 0], dtype=int32), (2,))
    """

    logits: Array  # [..., n]; need not be normalised

    @classmethod
    def create(cls, logits: Array, mask: Array | None = None) -> Categorical:
        """A categorical whose choices are limited to those where `mask` is true.

        A masked choice has probability 0 and no gradient; entropy and KL stay finite (a KL
        towards a distribution that forbids what this one does is huge rather than infinite).
        A row whose mask allows nothing has no distribution: its log-probabilities and their
        gradients are NaN, so that training stops there instead of taking a forbidden action for
        a choice. Its samples are in range.

        Args:
          logits: [..., n].
          mask: [..., n] bool, true where allowed; None: all are.

        Example:
          >>> Categorical.create(jnp.zeros(3), jnp.array([True, False, True])).probs()
          Array([0.5, 0. , 0.5], dtype=float32)
        """
        if mask is None:
            return cls(logits)
        if mask.shape != logits.shape:
            raise ValueError(
                f"an action mask must have the shape of the logits, {logits.shape}, "
                f"got {mask.shape}."
            )
        given = jnp.asarray(mask, bool)
        empty = ~jnp.any(given, axis=-1, keepdims=True)
        # Half of the lowest number: subtracting the maximum cannot overflow to −inf, and
        # 0 · log 0 stays 0.
        kept = jnp.where(given | empty, logits, jnp.finfo(logits.dtype).min / 2)
        # A sum, not a selection, which would keep the NaN out of the gradient.
        return cls(kept + jnp.where(empty, jnp.nan, 0).astype(kept.dtype))

    def log_probs(self) -> Array:
        """[..., n] log-probability of each choice."""
        return jax.nn.log_softmax(self.logits)

    def probs(self) -> Array:
        """[..., n] probability of each choice."""
        # Not softmax: a compiler may turn the division by a row's sum, or not, into a product with
        # the inverse, and decides another way on one device than on several.
        return jnp.exp(self.log_probs())

    def noise(self, key: jax.Array, prefix: tuple[int, ...] = ()) -> Array:
        """[*prefix, *batch]: one number per row; uniform, or logistic for two choices."""
        shape, dtype = (*prefix, *self.logits.shape[:-1]), self.logits.dtype
        if self.logits.shape[-1] == 2:
            return jax.random.logistic(key, shape, dtype)
        return jax.random.uniform(key, shape, dtype)

    def sample_with(self, noise: Array) -> Array:
        """The first choice at which the cumulative probability exceeds the noise.

        One number per row instead of one per choice makes a rollout's draws n times fewer than
        the Gumbel trick's. Of two choices the second wins if its logit leads by more than a
        logistic number: no exponential is left in the step. A masked choice is never taken.
        """
        n = self.logits.shape[-1]
        if n == 2:
            return (self.logits[..., 1] - self.logits[..., 0] > noise).astype(jnp.int32)
        weights = jnp.exp(self.logits - jnp.max(self.logits, axis=-1, keepdims=True))
        if n > _MAX_UNROLLED:
            # Rounding may let a parallel cumulative sum rise at a masked choice: leave those out.
            upto = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), -1)
            threshold = noise * jnp.max(upto, axis=-1)
            return jnp.argmax(threshold[..., None] < upto, axis=-1).astype(jnp.int32)
        total = weights[..., 0]
        for i in range(1, n):
            total = total + weights[..., i]
        # noise ≤ 1 − 2⁻²³, so threshold < total in floating point as well.
        threshold, upto = noise * total, jnp.zeros_like(total)
        action = jnp.zeros(total.shape, jnp.int32)
        for i in range(n - 1):
            upto = upto + weights[..., i]
            action = action + (threshold >= upto).astype(jnp.int32)
        return action

    def log_prob(self, action: Array) -> Array:
        """[*batch] log-probability of the choice."""
        return _pick(self.log_probs(), action)

    def entropy(self) -> Array:
        """−Σ p log p."""
        return -jnp.sum(self.probs() * self.log_probs(), axis=-1)

    def mode(self) -> Array:
        """The likeliest choice, the first of equals."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def kl(self, other: Categorical) -> Array:
        """Σ p (log p − log q)."""
        gap = self.log_probs() - other.log_probs()
        return jnp.sum(self.probs() * gap, axis=-1)


def _pick(values: Array, index: Array) -> Array:
    """values[..., index]: by comparison, since the gradient of a gather is a slow scatter."""
    choices = jax.lax.broadcasted_iota(index.dtype, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(choices == index[..., None], values, 0), axis=-1)


class MultiCategorical(Distribution):
    """k independent choices at once, entry i one of nvec[i].

    Example:
      >>> two = MultiCategorical.create(jnp.zeros((8, 5)), nvec=(2, 3))
      >>> two.sample(jax.random.key(0)).shape, two.entropy().shape
      ((8, 2), (8,))
    """

    logits: Array  # [..., k, max(nvec)], padded with choices that are masked

    @classmethod
    def create(
        cls, logits: Array | Sequence[Array], nvec: Sequence[int], mask: Array | None = None
    ) -> MultiCategorical:
        """From logits side by side, [..., Σ nvec], or a list of k arrays [..., nvec[i]].

        Args:
          logits: as above.
          nvec: how many choices each entry has.
          mask: [..., Σ nvec] bool, true where allowed; see `Categorical.create`.
        """
        parts: Any = logits if isinstance(logits, list | tuple) else [logits]
        flat = jnp.concatenate(parts, axis=-1)
        total, largest = sum(nvec), max(nvec)
        if flat.shape[-1] != total:
            raise ValueError(
                f"MultiCategorical needs {total} logits for nvec = {tuple(nvec)}, "
                f"got {flat.shape[-1]}."
            )
        if mask is not None and mask.shape != flat.shape:
            raise ValueError(
                f"an action mask for nvec = {tuple(nvec)} must have all choices side by side, "
                f"{flat.shape}, got {mask.shape}."
            )
        ends = np.cumsum(nvec)[:-1].tolist()

        def padded(x: Array, fill: Any) -> Array:
            parts = jnp.split(x, ends, axis=-1)
            batch = [(0, 0)] * (x.ndim - 1)
            pad = [
                jnp.pad(p, [*batch, (0, largest - n)], constant_values=fill)
                for p, n in zip(parts, nvec)
            ]
            return jnp.stack(pad, axis=-2)

        exists = np.arange(largest)[None, :] < np.asarray(nvec)[:, None]  # [k, max(nvec)]
        rows = padded(flat, 0)
        allowed = jnp.broadcast_to(exists, rows.shape)
        if mask is not None:
            allowed = allowed & padded(jnp.asarray(mask, bool), False)
        return cls(Categorical.create(rows, allowed).logits)

    @property
    def entries(self) -> Categorical:
        """The k choices as one batch, [..., k]."""
        return Categorical(self.logits)

    def noise(self, key: jax.Array, prefix: tuple[int, ...] = ()) -> Array:
        """[*prefix, *batch, k]."""
        return self.entries.noise(key, prefix)

    def sample_with(self, noise: Array) -> Array:
        """[*batch, k] int32."""
        return self.entries.sample_with(noise)

    def log_prob(self, action: Array) -> Array:
        """[*batch] of all entries together."""
        return jnp.sum(self.entries.log_prob(action), axis=-1)

    def entropy(self) -> Array:
        """The sum of the entries' entropies."""
        return jnp.sum(self.entries.entropy(), axis=-1)

    def mode(self) -> Array:
        """The likeliest choice of each entry."""
        return self.entries.mode()

    def kl(self, other: MultiCategorical) -> Array:
        """The sum of the entries' divergences."""
        return jnp.sum(self.entries.kl(other.entries), axis=-1)


class Bernoulli(Distribution):
    """n independent switches; p(on) = sigmoid(logits).

    Example:
      >>> Bernoulli(jnp.array([[2.0, -1.0]])).mode()
      Array([[1, 0]], dtype=int32)
    """

    logits: Array  # [..., n]

    def noise(self, key: jax.Array, prefix: tuple[int, ...] = ()) -> Array:
        """[*prefix, *batch, n] logistic."""
        return jax.random.logistic(key, (*prefix, *self.logits.shape), self.logits.dtype)

    def sample_with(self, noise: Array) -> Array:
        """[*batch, n] int32: on where the logit exceeds the noise."""
        return (self.logits > noise).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        """[*batch] of all switches together."""
        signed = jnp.where(action.astype(bool), self.logits, -self.logits)
        return jnp.sum(jax.nn.log_sigmoid(signed), axis=-1)

    def entropy(self) -> Array:
        """The sum of the switches' entropies."""
        p = jax.nn.sigmoid(self.logits)
        return jnp.sum(jax.nn.softplus(self.logits) - p * self.logits, axis=-1)

    def mode(self) -> Array:
        """On where that is likelier."""
        return (self.logits > 0).astype(jnp.int32)

    def kl(self, other: Bernoulli) -> Array:
        """The sum of the switches' divergences."""
        p = jax.nn.sigmoid(self.logits)
        gap = jax.nn.softplus(other.logits) - jax.nn.softplus(self.logits)
        return jnp.sum(p * (self.logits - other.logits) + gap, axis=-1)
