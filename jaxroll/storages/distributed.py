"""The distributed storage: a ring of unrolls between actors and learners, as one pytree.

A slot holds one environment's unroll of T steps with everything a learner needs to value it under
its own params: the last observation, the recurrent state at the start, the final observations of
truncated steps, and the version of the policy that acted. Slots are neighbours along axis 1 of
leaves [T, K, ...]; because K is a multiple of what is written and of what is read, both are plain
slices. First in, first out; each unroll is read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxroll.checks import check_count, check_divides, check_kind
from jaxroll.storages.arrays import allocate, check_example, check_finite, check_like
from jaxroll.storages.base import Storage
from jaxroll.storages.minibatches import MinibatchPlan
from jaxroll.types import Array, Node, PyTree, Transition
from jaxroll.varying import vary_as


class Unrolls(Node):
    """Unrolls of T steps, one environment each, side by side.

    Attributes:
      transition: [T, batch, ...].
      last_obs: [batch, ...] the observation after the last step.
      last_is_first: [batch] bool, last_obs starts an episode.
      initial_carry: [batch, ...] the recurrent state before step 0.
      final_obs: [S, batch, ...] final observations of truncated steps.
      final_step: [S, batch] int32 the truncated step; T where the row is empty.
      version: [batch] int32 of the policy that acted.
      weights: [batch] float32, 0 where there was nothing to read.
    """

    transition: Transition
    last_obs: PyTree
    last_is_first: Array
    initial_carry: PyTree
    final_obs: PyTree
    final_step: Array
    version: Array
    weights: Array


class RingCounters(Node):
    """The state of the ring, apart from its data: actors in lockstep share it.

    Attributes:
      read: [] int32 the oldest full slot.
      num_full: [] int32 unrolls that wait to be read.
      dropped: [] int32 unrolls that found no free slot.
      overflow: [] int32 truncated steps whose final observation found no row.
    """

    read: Array
    num_full: Array
    dropped: Array
    overflow: Array

    @classmethod
    def create(cls) -> Self:
        """Counters of an empty ring."""
        return cls(*(np.zeros((), np.int32) for _ in range(4)))


class DistributedStorage(Storage, kw_only=True):
    """K slots of unrolls, first in first out, for algorithms like IMPALA.

    Example:
      >>> step = Transition(obs=np.zeros((2, 3)), action=np.zeros(2), reward=np.ones(2),
      ...                   terminated=np.zeros(2, bool), log_prob=np.zeros(2))
      >>> ring = DistributedStorage.create(step, num_steps=5, num_storages=8, batch_size=4)
      >>> unroll = jax.tree.map(lambda x: np.stack([x] * 5), step)
      >>> for version in range(2):
      ...     ring = ring.add(unroll, last_obs=step.obs, version=version)
      >>> bool(ring.can_sample), ring.sample().version.tolist()
      (True, [0, 0, 1, 1])
      >>> int(ring.update().num_full)
      0

    Attributes:
      slots: K unrolls.
      counters_: which of them are full.
      num_envs: B, unrolls added at a time; static.
      batch_size: unrolls sampled at a time; static.
    """

    slots: Unrolls
    counters_: RingCounters
    num_envs: int = struct.field(pytree_node=False)
    batch_size: int = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        example: Transition,
        num_steps: int,
        *,
        num_storages: int | None = None,
        batch_size: int | None = None,
        initial_carry: PyTree = None,
        max_truncations: int = 1,
    ) -> Self:
        """Allocate K slots.

        Args:
          example: one step, leaves [B, ...]; B unrolls are added at a time. Inside `jax.shard_map`,
            give a step that varies over the mesh as those to be added do.
          num_steps: T, the length of an unroll.
          num_storages: K, a multiple of B and of batch_size; None: twice the smallest such.
          batch_size: unrolls that `sample` reads; None: B.
          initial_carry: the policy's recurrent state, leaves [B, ...], or None.
          max_truncations: S, final observations of truncated steps kept for each slot; more are
            counted, and the learner then falls back on the actor's value.
        """
        num_envs = check_example(example)
        num_steps = check_count("num_steps", num_steps)
        max_truncations = check_count("max_truncations", max_truncations, at_least=0)
        batch_size = num_envs if batch_size is None else check_count("batch_size", batch_size)
        if num_storages is None:
            num_storages = 2 * math.lcm(num_envs, batch_size)
        num_storages = check_count("num_storages", num_storages)
        check_divides("num_envs", num_envs, num_storages, "num_storages")
        check_divides("batch_size", batch_size, num_storages, "num_storages")
        slot = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], (example, initial_carry)))
        step, carry = allocate(slot, num_storages)
        slots = Unrolls(
            transition=allocate(step, num_steps),
            last_obs=jax.tree.map(jnp.copy, step.obs),
            last_is_first=jnp.zeros(num_storages, bool),
            initial_carry=carry,
            final_obs=allocate(step.obs, max_truncations),
            final_step=jnp.full((max_truncations, num_storages), num_steps, jnp.int32),
            version=jnp.zeros(num_storages, jnp.int32),
            weights=jnp.ones(num_storages, jnp.float32),
        )
        slots, counters = vary_as((slots, RingCounters.create()), like=(example, initial_carry))
        return cls(slots=slots, counters_=counters, num_envs=num_envs, batch_size=batch_size)

    # Sizes and state.

    @property
    def num_steps(self) -> int:
        """T, the length of an unroll."""
        return self.slots.transition.terminated.shape[0]

    @property
    def num_storages(self) -> int:
        """K, the number of slots."""
        return self.slots.version.shape[0]

    @property
    def num_full(self) -> Array:
        """[] int32: unrolls waiting to be read."""
        return self.counters_.num_full

    @property
    def dropped(self) -> Array:
        """[] int32: unrolls that found no free slot."""
        return self.counters_.dropped

    @property
    def can_add(self) -> Array:
        """[] bool: the next B unrolls fit."""
        return self.num_full + self.num_envs <= self.num_storages

    @property
    def can_sample(self) -> Array:
        """[] bool: a whole batch is waiting."""
        return self.num_full >= self.batch_size

    @property
    def fill(self) -> tuple[Array, int, str]:
        """(unrolls waiting, K, "unrolls")."""
        return self.num_full, self.num_storages, "unrolls"

    # Writing.

    def add(
        self,
        transition: Transition,
        last_obs: PyTree,
        initial_carry: PyTree = None,
        version: Array | int = 0,
        *,
        last_is_first: Array | None = None,
        final_obs: PyTree = None,
        final_step: Array | None = None,
        overflow: Array | int = 0,
    ) -> Self:
        """Write B unrolls into the next slots; with no room nothing is written, and it is counted.

        Args:
          transition: the unroll, leaves [T, B, ...].
          last_obs: [B, ...] the observation after its last step.
          initial_carry: [B, ...] the recurrent state before its first step.
          version: [] or [B] of the policy that acted.
          last_is_first: [B] bool, last_obs starts an episode; None: where the last step ended one.
          final_obs: [S, B, ...] final observations of truncated steps (see `FinalRows`).
          final_step: [S, B] int32 their steps, T where empty; required with final_obs.
          overflow: how many truncated steps found no row.
        """
        like = _slice_like(self.slots, self.num_envs)
        transition = check_like("unroll", transition, like.transition)
        if last_is_first is None:
            last_is_first = transition.terminated[-1]
            if transition.truncated is not None:
                last_is_first = last_is_first | transition.truncated[-1]
        if final_obs is None:
            final_obs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.final_obs)
            final_step = jnp.full(like.final_step.shape, self.num_steps, jnp.int32)
            if transition.truncated is not None:
                lost = transition.truncated & ~transition.terminated
                overflow = overflow + jnp.sum(lost, dtype=jnp.int32)
        elif final_step is None:
            raise ValueError(
                "final_obs needs final_step, the [S, B] steps that were truncated (T where empty)."
            )
        new = Unrolls(
            transition=transition,
            last_obs=last_obs,
            last_is_first=last_is_first,
            initial_carry=initial_carry,
            final_obs=final_obs,
            final_step=final_step,
            version=jnp.broadcast_to(jnp.asarray(version, jnp.int32), like.version.shape),
            weights=jnp.ones(like.weights.shape, jnp.float32),
        )
        return self._write(check_like("unroll", new, like), overflow)

    def _write(self, new: Unrolls, overflow: Array | int, used: Array | bool = True) -> Self:
        """Write B unrolls if there is room for them and they are `used` at all."""
        size, counters = self.num_envs, self.counters_
        fits = self.can_add & used
        start = (counters.read + counters.num_full) % self.num_storages

        def write(axis: int, x: Array, rows: Array) -> Array:
            old = jax.lax.dynamic_slice_in_dim(x, start, size, axis)
            rows = jnp.where(fits, rows, old)
            return jax.lax.dynamic_update_slice_in_dim(x, rows, start, axis)

        return self.replace(
            slots=_map_slots(write, self.slots, new),
            counters_=counters.replace(
                num_full=counters.num_full + jnp.where(fits, size, 0),
                dropped=counters.dropped + jnp.where(self.can_add | ~jnp.asarray(used), 0, size),
                overflow=counters.overflow + jnp.where(fits, overflow, 0),
            ),
        )

    def insert_data_slice(self, trajectory: Unrolls, initial_carry: PyTree = None) -> Self:
        """Add unrolls with their weights: what `sample` or `get_all_buffer_data` of a ring gave.

        B are written at a time; B that all weigh 0 are left out, so an empty slot stays empty.

        Args:
          trajectory: `Unrolls` of any number of slots.
          initial_carry: replaces the one in `trajectory` if given.
        """
        check_kind("trajectory", trajectory, Unrolls, "add(trajectory, last_obs, ...)")
        if initial_carry is not None:
            trajectory = trajectory.replace(initial_carry=initial_carry)
        size, count = self.num_envs, np.size(trajectory.weights)
        new = check_like("unrolls", trajectory, _slice_like(self.slots, count))
        ring = self
        for start in range(0, count, size):
            index = np.arange(start, start + size)
            block = _pick(new, np.minimum(index, count - 1))
            block = block.replace(weights=block.weights * (index < count).astype(np.float32))
            ring = ring._write(block, 0, jnp.any(block.weights > 0))
        return ring

    def before_gradients(self, last_values: PyTree = None) -> Self:
        """Nothing: off-policy targets depend on the learner's params and belong to its loss."""
        return self

    # Reading.

    def sample(self) -> Unrolls:
        """The `batch_size` oldest unrolls, leaves [T, batch, ...]; weights 0 if there are fewer."""
        batch = _map_slots(
            lambda axis, x: jax.lax.dynamic_slice_in_dim(
                x, self.counters_.read, self.batch_size, axis
            ),
            self.slots,
        )
        return batch.replace(weights=batch.weights * self.can_sample.astype(jnp.float32))

    def lag(self, version: Array | int) -> Array:
        """[batch] how many versions the next batch is behind."""
        read = self.counters_.read
        filled_by = jax.lax.dynamic_slice_in_dim(self.slots.version, read, self.batch_size)
        return jnp.asarray(version, jnp.int32) - filled_by

    def plan(
        self, key: jax.Array | None = None, num_mini_batch: int | None = None
    ) -> MinibatchPlan:
        """The next batches of `batch_size` unrolls, in order; `update` once for each that was used.

        Args:
          key: not used: each unroll is read once, first in first out.
          num_mini_batch: how many batches, 1 by default.
        """
        count = 1 if num_mini_batch is None else check_count("num_mini_batch", num_mini_batch)
        most = self.num_storages // self.batch_size
        if count > most:
            raise ValueError(f"num_mini_batch must be between 1 and {most}, got {count}.")
        offset = jnp.arange(count * self.batch_size, dtype=jnp.int32)
        weights = (offset < self.num_full).astype(jnp.float32)
        slots = (self.counters_.read + offset) % self.num_storages
        shape = (count, self.batch_size)
        return MinibatchPlan(slots.reshape(shape), weights.reshape(shape))

    def minibatch(self, row: MinibatchPlan) -> Unrolls:
        """The unrolls in the slots that `row` names."""
        batch = _pick(self.slots, row.indices)
        return batch.replace(weights=batch.weights * row.weights)

    def contents(self) -> Unrolls:
        """All K slots, the oldest unroll first; weights are 0 for those that are free."""
        order = jnp.arange(self.num_storages, dtype=jnp.int32)
        slots = _pick(self.slots, (order + self.counters_.read) % self.num_storages)
        return slots.replace(weights=slots.weights * (order < self.num_full).astype(jnp.float32))

    # Moving on.

    def update(self) -> Self:
        """Free the slots that `sample` read; nothing happens if there was no whole batch."""
        counters = self.counters_
        size = jnp.where(self.can_sample, self.batch_size, 0)
        return self.replace(
            counters_=counters.replace(
                read=(counters.read + size) % self.num_storages, num_full=counters.num_full - size
            )
        )

    def reset(self) -> Self:
        """Empty, and all counters 0."""
        return self.replace(counters_=jax.tree.map(jnp.zeros_like, self.counters_))

    def counters(self) -> dict[str, Array]:
        """`storage_dropped` unrolls and `storage_overflow` final observations."""
        return {
            "storage_dropped": self.counters_.dropped,
            "storage_overflow": self.counters_.overflow,
        }

    def check(self) -> Self:
        """Raise if unrolls were dropped, or none can be sampled, or one is not finite."""
        counters = jax.device_get(self.counters_)
        if counters.dropped:
            raise ValueError(
                f"{counters.dropped} unrolls found no free slot: num_storages = "
                f"{self.num_storages} and {counters.num_full} wait to be read. Call sample and "
                "update before add when can_add is False."
            )
        if counters.num_full < self.batch_size:
            raise ValueError(
                f"{counters.num_full} unrolls are stored, fewer than batch_size = "
                f"{self.batch_size}. Add more before sample; can_sample tells when."
            )
        contents = jax.device_get(self.contents())
        steps = contents.transition
        used = np.broadcast_to(contents.weights > 0, steps.terminated.shape)
        if steps.valid is not None:
            used = used & steps.valid
        # A bootstrap value is read only where a step was truncated.
        bootstraps = used if steps.truncated is None else used & steps.truncated
        check_finite(steps.replace(bootstrap_value=None), used, "unroll")
        check_finite({"bootstrap_value": steps.bootstrap_value}, bootstraps, "unroll")
        return self


def _map_slots(function: Callable[..., Any], slots: Unrolls, *rest: Unrolls) -> Unrolls:
    """function(axis, leaf, ...) of every leaf, where `axis` is that of the slots."""

    def call(path: Any, *leaves: Any) -> Any:
        has_rows = path[0].name in ("transition", "final_obs", "final_step")
        return function(1 if has_rows else 0, *leaves)

    return jax.tree_util.tree_map_with_path(call, slots, *rest)


def _pick(slots: Unrolls, index: Array) -> Unrolls:
    return _map_slots(lambda axis, x: jnp.take(x, index, axis=axis, mode="clip"), slots)


def _slice_like(slots: Unrolls, size: int) -> Unrolls:
    def like(axis: int, x: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)

    return _map_slots(like, slots)
