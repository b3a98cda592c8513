"""The rollout storage: T steps of B environments, their targets, and minibatches of them."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxroll import estimators
from jaxroll.checks import check_array, check_count, check_divides, check_kind
from jaxroll.storages import arrays, minibatches
from jaxroll.storages.base import Storage
from jaxroll.storages.minibatches import By, MinibatchPlan, Remainder
from jaxroll.types import Array, Minibatch, PyTree, Rollout, Targets, Transition
from jaxroll.varying import vary_as

_NONE = -1  # targets_at where there are no targets


class RolloutStorage(Storage, kw_only=True):
    """Experience of on-policy algorithms: filled, turned into targets, sampled, emptied.

    The observation after the last step is not here; its value comes as `last_values`.

    Example:
      >>> step = Transition(obs=np.zeros((2, 3)), action=np.zeros(2), reward=np.ones(2),
      ...                   terminated=np.zeros(2, bool), value=np.zeros(2))
      >>> storage = RolloutStorage.create(step, num_steps=4, discount=0.5)
      >>> for _ in range(4):
      ...     storage = storage.add(step)
      >>> storage = storage.compute_returns_and_advantages(last_values=np.zeros(2))
      >>> storage.sample(jax.random.key(0), num_mini_batch=2).transition.obs.shape
      (2, 4, 3)

    Attributes:
      data: [T, B, ...].
      targets: [T, B], or dicts of streams.
      initial_carry: [C, B, ...] before steps 0, L, 2L, …; None for a feed-forward policy.
      added: [] int32 adds since it was empty, those past the end included.
      lost: [] int32 adds past the end before that, since create or reset.
      targets_at: [] int32 how many adds the targets belong to; below 0: none.
      discount: [] float32, or a dict of streams.
      gae_lambda: [] float32, or a dict of streams.
      episodic: None: all streams end with the episode; else [] bool or a dict.
      sequence_length: L, None: T; static.
    """

    parameters: ClassVar[tuple[str, ...]] = ("discount", "gae_lambda", "episodic")
    rules: ClassVar[dict[str, str]] = {"discount": "in [0, 1]", "gae_lambda": "in [0, 1]"}

    data: Transition
    targets: Targets
    initial_carry: PyTree
    # One counter is all that an add moves: an operation more for each step would be seen.
    added: Array
    lost: Array
    targets_at: Array
    discount: PyTree
    gae_lambda: PyTree
    episodic: PyTree
    sequence_length: int | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls,
        example: Transition,
        num_steps: int,
        *,
        discount: PyTree = 0.99,
        gae_lambda: PyTree = 0.95,
        episodic: PyTree = None,
        initial_carry: PyTree = None,
        sequence_length: int | None = None,
    ) -> Self:
        """Allocate T rows like `example`.

        Args:
          example: one step, leaves [B, ...]. Dtypes are kept as given. Inside `jax.shard_map`, give
            a step that varies over the mesh as those to be added do.
          num_steps: T.
          discount: γ, a number, or a dict with one for each stream of `value`.
          gae_lambda: λ, likewise.
          episodic: False (or a dict of bools) for streams that ignore the end of an episode.
          initial_carry: the policy's recurrent state, leaves [B, ...]; minibatches are then
            sequences that start with it. None: a feed-forward policy.
          sequence_length: L steps for each sequence, must divide T; None: all T.
        """
        cls.check_example(example)
        num_steps = check_count("num_steps", num_steps)
        if sequence_length is not None:
            sequence_length = check_divides(
                "sequence_length", sequence_length, num_steps, "num_steps"
            )
        carry = initial_carry if jax.tree.leaves(initial_carry) else None
        data, advantages, returns, carries = vary_as(
            (
                arrays.allocate(example, num_steps),
                arrays.allocate(example.value, num_steps),
                arrays.allocate(example.value, num_steps),
                arrays.allocate(carry, num_steps // (sequence_length or num_steps)),
            ),
            like=(example, carry),
        )
        like = jax.tree.map(lambda _: np.zeros((), np.float32), example.value)
        flags = None if episodic is None else jax.tree.map(lambda x: x > 0, like)
        return cls(
            data=data,
            targets=Targets(advantages, returns),
            initial_carry=carries,
            added=np.zeros((), np.int32),
            lost=np.zeros((), np.int32),
            targets_at=np.full((), _NONE, np.int32),
            discount=arrays.as_parameter("discount", discount, like, cls.rules["discount"]),
            gae_lambda=arrays.as_parameter("gae_lambda", gae_lambda, like, cls.rules["gae_lambda"]),
            episodic=arrays.as_parameter("episodic", episodic, flags),
            sequence_length=sequence_length,
        )

    @staticmethod
    def check_example(example: Transition) -> None:
        """Called by `create`: raise unless the storage can be made from this step."""
        arrays.check_example(example)
        if example.value is None:
            raise ValueError(
                "the example needs a value [B], from which advantages are computed. Give "
                "Transition(..., value=V(obs)), or zeros where there is no critic."
            )
        if example.truncated is not None and example.bootstrap_value is None:
            raise ValueError(
                "an example with truncated needs bootstrap_value, V(final observation) of the "
                "truncated steps. Give both, or neither if no episode is cut short."
            )
        arrays.check_streams("reward", example.reward, example.value)
        if example.bootstrap_value is not None:
            arrays.check_streams("bootstrap_value", example.bootstrap_value, example.value)

    @classmethod
    def from_rollout(cls, rollout: Rollout, **options: Any) -> Self:
        """A full storage with the targets of what `jaxroll.collect` returned.

        Args:
          rollout: of T steps; sequences are as long as those whose carries it holds.
          options: as of `create`: `RolloutStorage.from_rollout(rollout, discount=0.99)`.
        """
        check_kind("rollout", rollout, Rollout, f"{cls.__name__}.create for other data")
        data, carries = rollout.transition, rollout.initial_carry
        num_steps = data.terminated.shape[0]
        if jax.tree.leaves(carries):
            options["initial_carry"] = jax.tree.map(lambda x: x[0], carries)
            num_sequences = jax.tree.leaves(carries)[0].shape[0]
            options["sequence_length"] = num_steps // num_sequences if num_sequences > 1 else None
        storage = cls.create(jax.tree.map(lambda x: x[0], data), num_steps, **options)
        return storage.insert_data_slice(data, carries).before_gradients(rollout.last_value)

    # Sizes, read off the shapes.

    @property
    def num_steps(self) -> int:
        """T, the number of rows."""
        return self.data.terminated.shape[0]

    @property
    def num_envs(self) -> int:
        """B, the number of environments."""
        return self.data.terminated.shape[1]

    @property
    def position(self) -> Array:
        """[] int32: rows written."""
        return jnp.minimum(self.added, self.num_steps)

    @property
    def dropped(self) -> Array:
        """[] int32: adds past the end, since create or reset."""
        return self.lost + jnp.maximum(self.added - self.num_steps, 0)

    @property
    def has_targets(self) -> Array:
        """[] bool: the targets belong to what is stored now."""
        return self.targets_at == self.added

    @property
    def is_full(self) -> Array:
        """[] bool: all T rows are written."""
        return self.added >= self.num_steps

    @property
    def is_recurrent(self) -> bool:
        """Whether minibatches are sequences with an initial carry."""
        return bool(jax.tree.leaves(self.initial_carry))

    @property
    def carry_interval(self) -> int:
        """L, the steps from one stored carry to the next."""
        return self.sequence_length or self.num_steps

    @property
    def fill(self) -> tuple[Array, int, str]:
        """(adds, T, "steps")."""
        return self.added, self.num_steps, "steps"

    # Writing.

    def add(self, transition: Transition, carry: PyTree = None) -> Self:
        """Write the next step; past the end nothing is written and `dropped` grows.

        Args:
          transition: leaves [B, ...] with the structure and dtypes of the example.
          carry: the recurrent state before this step, if the storage was created with one.
        """
        transition = arrays.check_like("transition", transition, arrays.row_like(self.data))
        full = self.is_full

        def write(x: Array, row: Array, index: Array, keep: Array) -> Array:
            # Both slices move an index past the end to the last row, which is then kept.
            options: dict[str, Any] = {"allow_negative_indices": False}
            old = jax.lax.dynamic_index_in_dim(x, index, keepdims=False, **options)
            row = jnp.where(keep, old, row)
            return jax.lax.dynamic_update_index_in_dim(x, row, index, 0, **options)

        def write_carry(x: Array, row: Array) -> Array:
            chunk, inside = self.added // self.carry_interval, self.added % self.carry_interval != 0
            return write(x, row, chunk, full | inside)

        carry = _check_carry(carry, arrays.row_like(self.initial_carry))
        initial_carry = jax.tree.map(write_carry, self.initial_carry, carry)
        data = jax.tree.map(lambda x, row: write(x, row, self.added, full), self.data, transition)
        return self.replace(data=data, initial_carry=initial_carry, added=self.added + 1)

    def insert_data_slice(self, trajectory: Transition, initial_carry: PyTree = None) -> Self:
        """Replace what is stored by a trajectory of up to T steps; a full one is not copied.

        Args:
          trajectory: leaves [T, B, ...]; with fewer steps the rest counts as not written.
          initial_carry: [C, B, ...] the recurrent states at the start of each sequence.
        """
        check_kind("trajectory", trajectory, Transition, "Transition with leaves [T, B, ...]")
        check_array("terminated", trajectory.terminated)
        steps = np.shape(trajectory.terminated)[0] if np.ndim(trajectory.terminated) else 0
        if not 1 <= steps <= self.num_steps:
            raise ValueError(
                f"a trajectory must have between 1 and num_steps = {self.num_steps} steps, got "
                f"{steps}. Create the storage with num_steps={steps}."
            )
        data = arrays.check_like("trajectory", trajectory, arrays.row_like(self.data), (steps,))
        if steps < self.num_steps:
            data = jax.tree.map(
                lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, 0, 0), self.data, data
            )
        carry = _check_carry(initial_carry, self.initial_carry)
        return self.replace(
            data=arrays.vary_leaves(data, self.data),
            initial_carry=arrays.vary_leaves(carry, self.initial_carry),
            added=_count(steps, self.added),
            lost=self.dropped,
            targets_at=_count(_NONE, self.targets_at),
        )

    # Targets.

    def compute_returns_and_advantages(self, last_values: PyTree) -> Self:
        """Raw advantages and returns of every row, by `jaxroll.estimators.gae`.

        Args:
          last_values: [B] V of the observation after the last written step; a dict for streams.
        """
        data = self.data
        arrays.check_streams("last_values", last_values, data.value)
        written = self._written()
        valid = written if data.valid is None else written & data.valid

        def targets(value, last, reward, bootstrap, discount, gae_lambda, episodic) -> Targets:
            last = jnp.asarray(check_array("last_values", last, (self.num_envs,)), value.dtype)
            # Rows that are not written are not experience, and last_values takes their place.
            value = jnp.where(written, value, last[None])
            ends = (data.terminated, data.truncated)
            if episodic is not None:
                ends = tuple(None if flags is None else flags & episodic for flags in ends)
            numbers = (bootstrap, discount, gae_lambda)
            return estimators.gae(reward, value, last, ends[0], ends[1], *numbers, valid=valid)

        streams = jax.tree.structure(data.value)
        numbers = (self.discount, self.gae_lambda, self.episodic)
        trees = (data.value, last_values, data.reward, data.bootstrap_value, *numbers)
        columns = (
            streams.flatten_up_to(x) if isinstance(x, dict) else [x] * streams.num_leaves
            for x in trees
        )
        each = [targets(*stream) for stream in zip(*columns, strict=True)]
        advantages = streams.unflatten([x.advantages for x in each])
        return self.with_targets(Targets(advantages, streams.unflatten([x.returns for x in each])))

    def with_targets(self, targets: Targets) -> Self:
        """The same rows with these targets: what a `before_gradients` of your own returns.

        Args:
          targets: [T, B] advantages and returns, or dicts of streams.
        """
        return self.replace(
            targets=arrays.vary_leaves(targets, self.targets), targets_at=self.added
        )

    def _implied(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Another discount, λ or episodic makes the targets stale."""
        changes = super()._implied(changes)
        if changes.keys() & set(self.parameters) and not changes.keys() & {"targets", "targets_at"}:
            changes["targets_at"] = _count(_NONE, self.targets_at)
        return changes

    def before_gradients(self, last_values: PyTree) -> Self:
        """The targets; override it to change rewards or add targets of your own."""
        return self.compute_returns_and_advantages(last_values)

    # Reading.

    def plan(
        self,
        key: jax.Array | None,
        *,
        by: By | None = None,
        sequence_length: int | None = None,
        **options: Any,
    ) -> MinibatchPlan:
        """Which rows go into which minibatch; see `jaxroll.storages.minibatches.plan`.

        With a carry or a `sequence_length`, rows are sequences unless `by` says otherwise.
        """
        if by is None:
            if sequence_length is None:
                sequence_length = self.sequence_length
            whole = "environment" if self.is_recurrent else "step"
            by = whole if sequence_length is None else "sequence"
        row_plan = minibatches.plan(
            key,
            num_steps=self.num_steps,
            num_envs=self.num_envs,
            by=by,
            sequence_length=sequence_length,
            **options,
        )
        length, stored = row_plan.sequence_length, self.carry_interval
        if self.is_recurrent and length not in (None, stored):
            raise ValueError(
                f"the carries are stored every {stored} steps, so sequences must have that length, "
                f"got {length}. Create the storage with sequence_length={length}."
            )
        return row_plan

    def minibatch(self, row: MinibatchPlan) -> Minibatch:
        """One minibatch: leaves [N, ...], or [L, N, ...] with initial carries for sequences.

        Without targets for what is stored it raises; inside jit all rows then weigh 0.
        """
        self._check_targets()
        picked, targets = minibatches.take((self.data, self.targets), row)
        index = minibatches.flat_indices(row, self.num_envs)
        is_written = self.has_targets & (index < self.position * self.num_envs)
        weights = _weights(jnp.where(is_written, row.weights, 0), picked)
        carry = None
        if self.is_recurrent and row.sequence_length is not None:
            carry = minibatches.take(self.initial_carry, row.replace(sequence_length=None))
        return Minibatch(picked, targets, weights, carry)

    def _check_targets(self) -> None:
        has_targets = self.has_targets
        if isinstance(has_targets, jax.core.Tracer) or has_targets:
            return
        raise ValueError(
            f"there are no targets for what is stored and its {', '.join(self.parameters)}. Call "
            "storage = storage.compute_returns_and_advantages(last_values) before sampling."
        )

    def sample(
        self, key: jax.Array, num_mini_batch: int | None = 8, *, remainder: Remainder = "error"
    ) -> Minibatch:
        """One epoch of M shuffled minibatches (None: one), stacked: leaves [M, N, ...].

        All minibatches at once in memory; agents scan `plan` instead.
        """
        return self.generate_batches(key, num_mini_batch, remainder=remainder).stacked()

    def contents(self) -> Minibatch:
        """All rows in order, leaves [T, B, ...]; weights are 0 for rows not written."""
        weights = _weights(self._written().astype(jnp.float32), self.data)
        return Minibatch(self.data, self.targets, weights, self.initial_carry)

    def _written(self) -> Array:
        """[T, B] bool: which rows are written."""
        rows = jnp.arange(self.num_steps)[:, None] < self.position
        return jnp.broadcast_to(rows, (self.num_steps, self.num_envs))

    # Moving on.

    def update(self) -> Self:
        """Empty again: the next add writes row 0."""
        return self.replace(
            added=_count(0, self.added),
            lost=self.dropped,
            targets_at=_count(_NONE, self.targets_at),
        )

    def reset(self) -> Self:
        """Empty, and all counters 0."""
        return self.update().replace(lost=_count(0, self.lost))

    def counters(self) -> dict[str, Array]:
        """`storage_dropped`: adds past the end."""
        return {"storage_dropped": self.dropped}

    def check(self, *, partial: bool = False) -> Self:
        """Raise if this storage is not fit to be sampled; outside jit only.

        Args:
          partial: a storage that is not full is fine.
        """
        position, dropped = jax.device_get((self.position, self.dropped))
        if dropped:
            raise ValueError(
                f"{dropped} steps were added past the end, num_steps = {self.num_steps}. Call "
                "storage.update() after each rollout, or create it with more rows."
            )
        if not partial and position < self.num_steps:
            raise ValueError(
                f"{position} of {self.num_steps} steps are written. Add the rest, or use "
                "check(partial=True) if that is meant."
            )
        self._check_targets()
        checked = {"value": self.data.value, "reward": self.data.reward, "targets": self.targets}
        arrays.check_finite(checked, np.asarray(self.contents().weights) > 0, "environment")
        return self


def _check_carry(carry: PyTree, like: PyTree) -> PyTree:
    carry = carry if jax.tree.leaves(carry) else None  # () of a feed-forward policy
    return arrays.check_like("carry", carry, like, of="initial_carry")


def _count(number: int, like: Array) -> Array:
    """A counter's new value, known while tracing."""
    return vary_as(np.asarray(number, np.int32), like=like)


def _weights(weights: Array, rows: Transition) -> Array:
    return weights if rows.valid is None else jnp.where(rows.valid, weights, 0)
