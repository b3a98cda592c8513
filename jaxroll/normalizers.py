"""Running statistics of observations and rewards, and a policy that sees normalised ones.

How training uses them, so that a run is the same on any number of devices:

1. A rollout is collected under statistics that do not change: `NormalizedPolicy` reads them from
   its params. The stored observations stay raw, so every epoch sees what the actor saw.
2. After the learner's update each actor reduces its rollout to `batch_statistics`.
3. The actors' statistics, [A], are added to the shared ones. In exact mode they are gathered and
   added in actor order (`merge_all`): which device held which actor has no effect, to the last
   bit. In fast mode they are pooled by one formula (`merge_pooled`), however many actors there are.

Evaluation changes no params, so there the statistics are frozen by construction.

A row with an entry that is not finite has no weight: one NaN must not stay for the rest of a run.

Variances are kept rather than sums of squares, and batches are centred on the old mean before
they are squared: float32 then holds for large offsets and for billions of rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxroll.types import Array, Node, PolicyOutput, PyTree, as_leaf

MASK = "action_mask"


class RunningStatistics(Node):
    """Count, mean and variance of all rows seen so far, for each entry of an observation.

    Merging is Chan's formula, with w = n_b / (n_a + n_b):

        mean ← mean_a + w (mean_b − mean_a)
        var  ← var_a + w (var_b − var_a) + w (1 − w) (mean_b − mean_a)²

    Example:
      >>> statistics = RunningStatistics.create(np.zeros(2))
      >>> statistics = statistics.update(np.array([[1.0, 5.0], [3.0, 5.0]]))
      >>> statistics.mean.tolist(), statistics.std.tolist(), float(statistics.count)
      ([2.0, 5.0], [1.0, 0.0], 2.0)

    Chan et al., 1983, https://doi.org/10.1080/00031305.1983.10483115
    """

    count: Array  # [] float32 rows seen (their total weight)
    count_rest: Array  # [] float32 what count cannot hold: float32 alone stops growing at 2²⁴
    mean: PyTree  # float32, the shapes of one observation
    variance: PyTree  # float32

    @classmethod
    def create(cls, example: PyTree) -> RunningStatistics:
        """Statistics of no rows.

        Args:
          example: one observation (no batch axis), arrays or shapes; any pytree, any dtype.
        """
        zeros = jax.tree.map(lambda x: np.zeros(np.shape(x), np.float32), example)
        zero = np.zeros((), np.float32)
        return cls(count=zero, count_rest=zero, mean=zeros, variance=jax.tree.map(np.copy, zeros))

    @property
    def std(self) -> PyTree:
        """The standard deviation (ddof 0), as observations are shaped."""
        return jax.tree.map(jnp.sqrt, self.variance)

    def update(self, batch: PyTree, weights: Array | None = None) -> RunningStatistics:
        """The statistics after more rows.

        Args:
          batch: observations with any leading axes, [N, ...] or [T, B, ...].
          weights: [N] or [T, B]; rows of weight 0 have no effect, whatever stands in them. Nor
            have rows with an entry that is not finite.
        """
        return self.merge(self.batch_statistics(batch, weights))

    def batch_statistics(self, batch: PyTree, weights: Array | None = None) -> RunningStatistics:
        """The statistics of these rows alone; those seen so far serve only to centre them."""
        lead = _leading_shape(batch, self.mean)
        if weights is None:
            weights = jnp.ones(lead, jnp.float32)
        elif jnp.shape(weights) != lead:
            raise ValueError(
                f"weights must have the leading axes of the batch, {list(lead)}, "
                f"got {list(jnp.shape(weights))}."
            )
        weights = jnp.where(_finite_rows(batch, lead), jnp.asarray(weights, jnp.float32), 0)
        count = jnp.sum(weights)
        axes = tuple(range(len(lead)))

        def statistics(x: Array, center: Array) -> tuple[Array, Array]:
            w = weights.reshape(lead + (1,) * center.ndim)
            x = jnp.asarray(x).astype(jnp.float32) - center.reshape((1,) * len(lead) + center.shape)
            x = jnp.where(w > 0, x, 0)
            divisor = jnp.where(count > 0, count, 1)
            shift = jnp.sum(x * w, axes, keepdims=True) / divisor
            variance = jnp.sum(jnp.square(x - shift) * w, axes) / divisor
            return center + shift.reshape(center.shape), variance

        pairs = jax.tree.map(statistics, batch, jax.tree.map(jnp.asarray, self.mean))
        mean, variance = jax.tree.transpose(
            jax.tree.structure(self.mean), jax.tree.structure((0, 0)), pairs
        )
        return RunningStatistics(count, jnp.zeros_like(count), mean, variance)

    def merge(self, other: RunningStatistics) -> RunningStatistics:
        """The statistics of the rows of both."""
        count, rest = _add(self.count, self.count_rest, other.count, other.count_rest)
        w = jnp.where(count > 0, other.count / jnp.where(count > 0, count, 1), 0)

        def variance(var_a: Array, var_b: Array, mean_a: Array, mean_b: Array) -> Array:
            return var_a + w * (var_b - var_a) + w * (1 - w) * jnp.square(mean_b - mean_a)

        return RunningStatistics(
            count=count,
            count_rest=rest,
            mean=jax.tree.map(lambda a, b: a + w * (b - a), self.mean, other.mean),
            variance=jax.tree.map(variance, self.variance, other.variance, self.mean, other.mean),
        )

    def merge_all(self, stacked: RunningStatistics) -> RunningStatistics:
        """These statistics and, one after the other, A more with a leading axis [A, ...].

        The order is that of the axis, so the result does not depend on how it was gathered.
        """
        start = jax.tree.map(jnp.asarray, self)
        return lax.scan(lambda total, one: (total.merge(one), None), start, stacked)[0]

    def merge_pooled(self, stacked: RunningStatistics, axis_name: Any = None) -> RunningStatistics:
        """These statistics and A more, [A, ...], pooled by one formula instead of one by one.

        With wₐ = nₐ / Σ n:

            mean = Σ wₐ meanₐ,    var = Σ wₐ (varₐ + (meanₐ − mean)²)

        Args:
          stacked: of the actors of this device.
          axis_name: the mesh axis behind which the others are; None: there are none. Two
            all-reduces of one observation's size take the place of a gather of A.
        """

        def total(x: Array) -> Array:
            x = jnp.sum(x, axis=0)
            return x if axis_name is None else lax.psum(x, axis_name)

        count = total(stacked.count)
        weights = stacked.count / jnp.where(count > 0, count, 1)

        def weighted(x: Array) -> Array:
            return total(weights.reshape(weights.shape + (1,) * (x.ndim - 1)) * x)

        def pooled(mean: Array, variance: Array, center: Array) -> tuple[Array, Array]:
            pooled_mean = center + weighted(mean - center[None])  # float32 has few digits
            return pooled_mean, weighted(variance + jnp.square(mean - pooled_mean[None]))

        pairs = jax.tree.map(pooled, stacked.mean, stacked.variance, self.mean)
        mean, variance = jax.tree.transpose(
            jax.tree.structure(self.mean), jax.tree.structure((0, 0)), pairs
        )
        return self.merge(RunningStatistics(count, jnp.zeros_like(count), mean, variance))

    def normalize(self, x: PyTree, clip: float | None = 10.0) -> PyTree:
        """(x − mean) / std, clipped to ±clip; x as it is, but clipped, while no row was seen.

        Args:
          x: observations with any leading axes.
          clip: None: no clipping.

        Returns:
          the shapes of x; float32, or the dtype of x if that is a float.
        """

        def one(x: Array, mean: Array, variance: Array) -> Array:
            x = jnp.asarray(x)
            dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32
            # An entry that never changed has no spread but that of rounding.
            std = jnp.maximum(jnp.sqrt(variance), 1e-4 + 1e-6 * jnp.abs(mean))
            std = jnp.where(self.count > 0, std, 1)
            lead = (1,) * (x.ndim - jnp.ndim(mean))
            y = x.astype(jnp.float32) - jnp.reshape(mean, lead + jnp.shape(mean))
            # Times the inverse: a compiler may or may not make that of a division by a broadcast
            # row, and decides another way on one device than on several.
            y = y * (1.0 / std).reshape(lead + std.shape)
            return (y if clip is None else jnp.clip(y, -clip, clip)).astype(dtype)

        return jax.tree.map(one, x, self.mean, self.variance)


def _add(a: Array, a_rest: Array, b: Array, b_rest: Array) -> tuple[Array, Array]:
    """(a + a_rest) + (b + b_rest) as such a pair: exact to about 48 bits (Knuth's two-sum)."""
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part) + (a_rest + b_rest)
    result = total + lost
    return result, lost - (result - total)


def _leading_shape(batch: PyTree, mean: PyTree) -> tuple[int, ...]:
    """The leading axes that all leaves of the batch have in common."""
    shapes = [
        (jnp.shape(x), jnp.shape(m))
        for x, m in zip(
            jax.tree.structure(mean).flatten_up_to(batch), jax.tree.leaves(mean), strict=True
        )
    ]
    leads = {x[: len(x) - len(m)] for x, m in shapes}
    if len(leads) != 1 or any(x[len(x) - len(m) :] != m for x, m in shapes):
        raise ValueError(
            "a batch must have the observation's shapes after common leading axes: got "
            f"{[list(x) for x, _ in shapes]} for {[list(m) for _, m in shapes]}."
        )
    return leads.pop()


def _finite_rows(batch: PyTree, lead: tuple[int, ...]) -> Array:
    """[*lead] whether every entry of a row is finite."""
    finite = jnp.ones(lead, bool)
    for x in map(jnp.asarray, jax.tree.leaves(batch)):
        if jnp.issubdtype(x.dtype, jnp.floating):
            finite &= jnp.isfinite(x).all(tuple(range(len(lead), x.ndim)))
    return finite


class RewardScaler(Node):
    """Divides rewards by the running spread of their discounted sums.

    The mean is left alone: shifting rewards changes what is best to do. The sums run on from
    rollout to rollout in [B] accumulators that belong to the actor; see `discounted_sums`.

    Example:
      >>> scaler = RewardScaler.create(discount=0.5)
      >>> rewards, no = jnp.array([[1.0], [3.0]]), jnp.zeros((2, 1), bool)
      >>> sums, accumulators = discounted_sums(rewards, no, no, jnp.zeros(1), scaler.discount)
      >>> scaler = scaler.update(sums)
      >>> sums[:, 0].tolist(), scaler.scale(rewards)[:, 0].tolist()
      ([1.0, 3.5], [0.800000011920929, 2.4000000953674316])
    """

    statistics: RunningStatistics  # of the sums; scalar
    discount: Array  # [] float32

    @classmethod
    def create(cls, discount: Array | float = 0.99) -> RewardScaler:
        """A scaler that has seen nothing, and so changes nothing but by clipping."""
        return cls(RunningStatistics.create(np.zeros(())), as_leaf(discount))

    def update(self, sums: Array, weights: Array | None = None) -> RewardScaler:
        """After more discounted sums, [T, B]; weights are 0 where a row is not valid."""
        return self.replace(statistics=self.statistics.update(sums, weights))

    def scale(self, rewards: Array, clip: float | None = 10.0) -> Array:
        """Rewards over the spread of their sums, clipped to ±clip."""
        statistics = self.statistics.replace(mean=jnp.zeros_like(self.statistics.mean))
        return statistics.normalize(rewards, clip)


def discounted_sums(
    rewards: Array,
    terminated: Array | None,
    truncated: Array | None,
    accumulators: Array,
    discount: Array | float,
) -> tuple[Array, Array]:
    """What has been earned so far in each episode, the past fading.

        sₜ = rₜ + γ (1 − doneₜ₋₁) sₜ₋₁

    After a sum that is not finite, the next starts at 0 again.

    Args:
      rewards: [T, B].
      terminated: [T, B]; None: episodes' ends do not cut (as for intrinsic rewards).
      truncated: [T, B], or None.
      accumulators: [B] the sums before the first row; 0 where an episode starts.
      discount: γ.

    Returns:
      ([T, B] sums, [B] accumulators for the next rollout), float32.
    """
    done = jnp.zeros(rewards.shape, bool)
    for flags in (terminated, truncated):
        done = done if flags is None else done | flags.astype(bool)

    def step(total: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, done = row
        total = reward + jnp.asarray(discount, total.dtype) * total
        return jnp.where(done | ~jnp.isfinite(total), 0, total), total

    accumulators, sums = lax.scan(
        step, accumulators.astype(jnp.float32), (rewards.astype(jnp.float32), done)
    )
    return sums, accumulators


class NormalizedParams(Node):
    """The params of a `NormalizedPolicy`. A learner trains `policy` only."""

    policy: PyTree
    statistics: RunningStatistics


@dataclasses.dataclass(frozen=True)
class NormalizedPolicy:
    """A policy whose inner policy sees observations with zero mean and unit spread.

    It is a `Policy` itself; no gradient flows into the statistics. An action mask (the key
    "action_mask" of a dict observation) is handed on as it is.

    Example:
      >>> from jaxroll.envs import make_env
      >>> from jaxroll.networks import make_policy
      >>> env = make_env("CartPole-v1")
      >>> policy = NormalizedPolicy(make_policy(env.observation_space, env.action_space))
      >>> obs = jnp.ones((8, 4))
      >>> params = policy.init(jax.random.key(0), obs)
      >>> params = policy.update_statistics(params, obs)
      >>> float(params.statistics.count)
      8.0
    """

    policy: Any
    clip: float | None = 10.0

    @property
    def has_separate_value(self) -> bool:
        """As the inner policy's."""
        return getattr(self.policy, "has_separate_value", False)

    def init(self, key: jax.Array, obs: PyTree) -> NormalizedParams:
        """Params of the inner policy, and statistics of no rows; `obs` has a leading batch axis."""
        example = jax.tree.map(lambda x: np.zeros(x.shape[1:], np.float32), _without_mask(obs))
        statistics = jax.tree.map(jnp.asarray, RunningStatistics.create(example))
        obs = self._normalize(statistics, obs)
        return NormalizedParams(self.policy.init(key, obs), statistics)

    def initial_carry(self, batch_size: int) -> PyTree:
        """The inner policy's."""
        return self.policy.initial_carry(batch_size)

    def apply(
        self, params: NormalizedParams, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """The inner policy's, on normalised observations [B, ...]."""
        obs = self._normalize(params.statistics, obs)
        return self.policy.apply(params.policy, carry, obs, is_first)

    def unroll(
        self, params: NormalizedParams, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """The inner policy's, on normalised observations [T, B, ...]."""
        obs = self._normalize(params.statistics, obs)
        return self.policy.unroll(params.policy, carry, obs, is_first)

    def value(
        self, params: NormalizedParams, carry: PyTree, obs: PyTree, is_first: Array
    ) -> PyTree:
        """The inner policy's, on normalised observations [B, ...]."""
        obs = self._normalize(params.statistics, obs)
        return self.policy.value(params.policy, carry, obs, is_first)

    def act_extras(self, params: NormalizedParams, output: PolicyOutput, action: PyTree) -> PyTree:
        """The inner policy's, or the extras of its output if it has none of its own."""
        inner = getattr(self.policy, "act_extras", None)
        return inner(params.policy, output, action) if inner else output.extras

    def batch_statistics(
        self, params: NormalizedParams, obs: PyTree, weights: Array | None = None
    ) -> RunningStatistics:
        """The statistics of one actor's rollout, [T, B, ...], to be gathered over actors."""
        return params.statistics.batch_statistics(_without_mask(obs), weights)

    def merge_statistics(
        self, params: NormalizedParams, stacked: RunningStatistics
    ) -> NormalizedParams:
        """Params with the rollouts of A actors added in actor order; leaves [A, ...]."""
        return params.replace(statistics=params.statistics.merge_all(stacked))

    def update_statistics(
        self, params: NormalizedParams, obs: PyTree, weights: Array | None = None
    ) -> NormalizedParams:
        """Params with one rollout added: all there is to do where there is one actor."""
        return params.replace(statistics=params.statistics.update(_without_mask(obs), weights))

    def _normalize(self, statistics: RunningStatistics, obs: PyTree) -> PyTree:
        normalized = lax.stop_gradient(statistics).normalize(_without_mask(obs), self.clip)
        return {**normalized, MASK: obs[MASK]} if _has_mask(obs) else normalized


def _has_mask(obs: PyTree) -> bool:
    return isinstance(obs, dict) and MASK in obs


def _without_mask(obs: PyTree) -> PyTree:
    return {k: v for k, v in obs.items() if k != MASK} if _has_mask(obs) else obs
