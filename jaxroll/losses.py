"""Losses and diagnostics, each as a sum and its weight: (Σ w·ℓ, Σ w).

Sums add over actors, minibatch chunks and devices, a mean of means does not once rows are padded
or invalid. Whoever pools divides: gradient = Σ∇(Σ w·ℓ) / ΣΣ w (or by 1, where an algorithm sums).

Arrays have any common shape, [N] or [T, B]. `weights` None weighs every row by 1. Where the
weight is 0 a row may hold anything, NaN included: it is replaced before the formula, so neither
the sum nor its gradient sees it. What enters the network needs the same care, see `safe_rows`.

Estimates (advantages, returns, old log-probabilities and values) are constants: no gradient
flows into them.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from jaxroll.checks import check_array, check_number
from jaxroll.sums import total
from jaxroll.types import Array, Node, PyTree

WeightedSum = tuple[Array, Array]  # (Σ w·ℓ, Σ w)


def safe_rows(tree: PyTree, weights: Array | None) -> PyTree:
    """The same rows, with zeros where the weight is 0.

    A NaN that enters a network spreads through its weights' gradient even if its loss is masked
    (0 · NaN); clear such rows first.

    Args:
      tree: leaves [*weights.shape, ...].
      weights: [N] or [L, N]; None: nothing to clear.

    Example:
      >>> safe_rows(jnp.array([1.0, jnp.nan]), jnp.array([1.0, 0.0]))
      Array([1., 0.], dtype=float32)
    """
    if weights is None:
        return tree

    def clear(x: Array) -> Array:
        keep = (weights != 0).reshape(*weights.shape, *[1] * (x.ndim - weights.ndim))
        return jnp.where(keep, x, jnp.zeros_like(x))

    return jax.tree.map(clear, tree)


def _rows(weights: Array | None, **arrays: PyTree) -> list[PyTree]:
    """The arrays with zeros where the weight is 0; all but the first are constants.

    Refuses what would broadcast: [N, 1] − [N] is [N, N], and its sum a number like any other.
    """
    first, *estimates = arrays.values()
    leaves = {
        f"{name}{jax.tree_util.keystr(path)}": check_array(name, x)
        for name, tree in (arrays if weights is None else {**arrays, "weights": weights}).items()
        for path, x in jax.tree.leaves_with_path(tree, is_leaf=lambda x: not isinstance(x, dict))
    }
    got = ", ".join(f"{name} {list(x.shape)}" for name, x in leaves.items())
    if any(jax.tree.structure(tree) != jax.tree.structure(first) for tree in estimates):
        raise ValueError(
            f"{', '.join(arrays)} must be single arrays or dicts of the same streams, got {got}."
        )
    if len({x.shape for x in leaves.values()}) > 1:
        raise ValueError(
            f"{', '.join(arrays)} must have one common shape, [N] or [T, B], also of the weights, "
            f"got {got}. Use x.squeeze(-1) for a last axis of size 1."
        )
    return safe_rows([first, *lax.stop_gradient(estimates)], weights)


def weighted_sum(losses: PyTree, weights: Array | None = None) -> WeightedSum:
    """(Σ w·ℓ, Σ w); entries of weight 0 do not count, whatever they hold.

    A dict of streams is added up first.

    Example:
      >>> weighted_sum(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([1.0, 0.5, 0.0]))
      (Array(2., dtype=float32), Array(1.5, dtype=float32))
    """
    losses = functools.reduce(operator.add, jax.tree.leaves(losses))
    losses = losses.astype(jnp.promote_types(losses.dtype, jnp.float32))
    if weights is None:
        return total(losses), jnp.asarray(losses.size, losses.dtype)
    if weights.shape != losses.shape:
        raise ValueError(
            f"weights must have the shape of the losses, {losses.shape}, got {weights.shape}."
        )
    scale = jnp.asarray(weights, losses.dtype)
    return total(jnp.where(scale != 0, scale * losses, 0)), total(scale)


def clipped_policy_loss(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    weights: Array | None = None,
    *,
    clip_epsilon: Array | float = 0.2,
) -> WeightedSum:
    """PPO's surrogate: no gain from moving the ratio further than ε from 1.

        r = π(a|s) / π_old(a|s)
        ℓ = −min(r A, clip(r, 1 − ε, 1 + ε) A)

    Args:
      log_probs: [N] of the actions taken, under the policy that learns.
      old_log_probs: [N] under the policy that acted.
      advantages: [N], normalised or not.
      weights: [N].
      clip_epsilon: ε.

    Example:
      >>> loss, weight = clipped_policy_loss(jnp.zeros(4), jnp.zeros(4), jnp.ones(4))
      >>> float(loss / weight)
      -1.0

    Schulman et al., 2017, https://arxiv.org/abs/1707.06347
    """
    check_number("clip_epsilon", clip_epsilon, ">= 0", finite=False)
    log_probs, old_log_probs, advantages = _rows(
        weights, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    ratio = jnp.exp(log_probs - old_log_probs)
    clipped = jnp.clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon)
    return weighted_sum(-jnp.minimum(ratio * advantages, clipped * advantages), weights)


def policy_gradient_loss(
    log_probs: Array, advantages: Array, weights: Array | None = None
) -> WeightedSum:
    """ℓ = −A log π(a|s): its gradient is the policy gradient.

    For A2C and REINFORCE with their advantages; for IMPALA with V-trace's policy-gradient
    advantages, which hold the clipped importance weight ρ already.

    Args:
      log_probs: [N] of the actions taken, under the policy that learns.
      advantages: [N].
      weights: [N].

    Example:
      >>> policy_gradient_loss(jnp.array([-0.5]), jnp.array([2.0]))[0]
      Array(1., dtype=float32)
    """
    log_probs, advantages = _rows(weights, log_probs=log_probs, advantages=advantages)
    return weighted_sum(-log_probs * advantages, weights)


def value_loss(values: PyTree, returns: PyTree, weights: Array | None = None) -> WeightedSum:
    """ℓ = ½ (V − R)²; dicts of streams are added up.

    Example:
      >>> value_loss(jnp.array([1.0, 3.0]), jnp.zeros(2))
      (Array(5., dtype=float32), Array(2., dtype=float32))
    """
    values, returns = _rows(weights, values=values, returns=returns)
    losses = jax.tree.map(lambda v, r: 0.5 * jnp.square(v - r), values, returns)
    return weighted_sum(losses, weights)


def clipped_value_loss(
    values: PyTree,
    old_values: PyTree,
    returns: PyTree,
    weights: Array | None = None,
    *,
    clip_epsilon: Array | float = 0.2,
) -> WeightedSum:
    """The value loss, the worse of V and V kept within ε of what it was.

        ℓ = ½ max((V − R)², (V_old + clip(V − V_old, −ε, ε) − R)²)

    Dicts of streams are added up.

    Example:
      >>> clipped_value_loss(jnp.ones(1), jnp.zeros(1), jnp.ones(1), clip_epsilon=0.5)[0]
      Array(0.125, dtype=float32)
    """
    check_number("clip_epsilon", clip_epsilon, ">= 0", finite=False)
    values, old_values, returns = _rows(
        weights, values=values, old_values=old_values, returns=returns
    )

    def loss(v: Array, old: Array, r: Array) -> Array:
        clipped = old + jnp.clip(v - old, -clip_epsilon, clip_epsilon)
        return 0.5 * jnp.maximum(jnp.square(v - r), jnp.square(clipped - r))

    return weighted_sum(jax.tree.map(loss, values, old_values, returns), weights)


def advantage_loss(
    adv_preds: Array, advantages: Array, weights: Array | None = None
) -> WeightedSum:
    """ℓ = (Â(s, a) − A)²: how DAAC's policy network learns the advantage.

    Example:
      >>> advantage_loss(jnp.array([1.0]), jnp.array([3.0]))[0]
      Array(4., dtype=float32)

    Raileanu & Fergus, 2021, https://arxiv.org/abs/2102.10330
    """
    adv_preds, advantages = _rows(weights, adv_preds=adv_preds, advantages=advantages)
    return weighted_sum(jnp.square(adv_preds - advantages), weights)


def entropy_bonus(entropies: Array, weights: Array | None = None) -> WeightedSum:
    """(Σ w·H, Σ w); a loss subtracts it.

    Example:
      >>> entropy_bonus(jnp.array([0.5, 0.7]))[1]
      Array(2., dtype=float32)
    """
    (entropies,) = _rows(weights, entropies=entropies)
    return weighted_sum(entropies, weights)


def approximate_kl(
    log_probs: Array, old_log_probs: Array, weights: Array | None = None
) -> WeightedSum:
    """KL(π_old ‖ π) from the actions taken: r − 1 − log r, unbiased and never negative.

    Example:
      >>> float(approximate_kl(jnp.zeros(4), jnp.zeros(4))[0])
      0.0

    Schulman, 2020, http://joschu.net/blog/kl-approx.html (k3)
    """
    log_probs, old_log_probs = _rows(weights, log_probs=log_probs, old_log_probs=old_log_probs)
    log_ratio = log_probs - old_log_probs
    return weighted_sum(jnp.expm1(log_ratio) - log_ratio, weights)


def clip_fraction(
    log_probs: Array,
    old_log_probs: Array,
    weights: Array | None = None,
    *,
    clip_epsilon: Array | float = 0.2,
) -> WeightedSum:
    """How many rows have a ratio outside [1 − ε, 1 + ε].

    Example:
      >>> clip_fraction(jnp.log(jnp.array([1.0, 1.5])), jnp.zeros(2))
      (Array(1., dtype=float32), Array(2., dtype=float32))
    """
    check_number("clip_epsilon", clip_epsilon, ">= 0", finite=False)
    log_probs, old_log_probs = _rows(weights, log_probs=log_probs, old_log_probs=old_log_probs)
    outside = jnp.abs(jnp.exp(log_probs - old_log_probs) - 1) > clip_epsilon
    return weighted_sum(outside.astype(jnp.float32), weights)


class ExplainedVarianceSums(Node):
    """Weighted moments of returns and of what values leave unexplained; they add over actors."""

    weight: Array  # [] Σ w
    returns: Array  # [] Σ w R
    returns_squared: Array  # [] Σ w R²
    errors: Array  # [] Σ w (R − V)
    errors_squared: Array  # [] Σ w (R − V)²

    def result(self) -> Array:
        """1 − Var(R − V) / Var(R): 1 perfect, 0 no better than a constant.

        NaN where the returns do not vary: nothing is there to be explained.
        """

        def variance(total: Array, squares: Array) -> Array:
            return squares / self.weight - jnp.square(total / self.weight)

        spread = variance(self.returns, self.returns_squared)
        left = variance(self.errors, self.errors_squared)
        return jnp.where(spread > 0, 1 - left / jnp.where(spread > 0, spread, 1), jnp.nan)


def explained_variance_sums(
    values: Array, returns: Array, weights: Array | None = None
) -> ExplainedVarianceSums:
    """The moments from which `result()` gives the explained variance of the pooled rows.

    Add two with `jax.tree.map(jnp.add, a, b)`, over devices with `psum`; a mean of explained
    variances is something else.

    Example:
      >>> returns = jnp.array([1.0, 2.0, 3.0, 4.0])
      >>> float(explained_variance_sums(returns, returns).result())
      1.0
    """
    values, returns = lax.stop_gradient(_rows(weights, values=values, returns=returns))
    errors = returns - values
    rows = (returns, jnp.square(returns), errors, jnp.square(errors))
    return ExplainedVarianceSums(
        weighted_sum(returns, weights)[1], *(weighted_sum(x, weights)[0] for x in rows)
    )
