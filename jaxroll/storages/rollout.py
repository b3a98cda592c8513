"""The rollout storage: T steps of B environments, their targets, and minibatches of them."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxroll import estimators
from jaxroll.checks import check_array, check_count, check_divides
from jaxroll.storages import minibatches
from jaxroll.storages.arrays import (
    allocate,
    as_parameter,
    check_example,
    check_finite,
    check_like,
    row_like,
    vary_leaves,
)
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
        check_example(example)
        num_steps = check_count("num_steps", num_steps)
        if example.value is None:
            raise ValueError(
                "a RolloutStorage computes advantages, so the example needs a value [B]. "
                "Give Transition(..., value=V(obs)), or zeros where there is no critic."
            )
        if example.truncated is not None and example.bootstrap_value is None:
            raise ValueError(
                "an example with truncated needs bootstrap_value, V(final observation) of the "
                "truncated steps. Give both, or neither if no episode is cut short."
            )
        length = num_steps
        if sequence_length is not None:
            length = sequence_length = check_count("sequence_length", sequence_length)
            check_divides("sequence_length", length, num_steps, f"num_steps = {num_steps}")
        streams = _streams(example)

        def parameter(name: str, value: PyTree, dtype: type = np.float32) -> PyTree:
            like = np.zeros((), dtype)
            like = like if streams is None else dict.fromkeys(streams, like)
            return as_parameter(name, value, like, cls.rules.get(name))

        targets = Targets(allocate(example.value, num_steps), allocate(example.value, num_steps))
        arrays = vary_as(
            {
                "data": allocate(example, num_steps),
                "targets": targets,
                "initial_carry": allocate(initial_carry, num_steps // length),
            },
            like=(example, initial_carry),
        )
        return cls(
            **arrays,
            added=np.zeros((), np.int32),
            lost=np.zeros((), np.int32),
            targets_at=np.full((), _NONE, np.int32),
            discount=parameter("discount", discount),
            gae_lambda=parameter("gae_lambda", gae_lambda),
            episodic=None if episodic is None else parameter("episodic", episodic, bool),
            sequence_length=sequence_length,
        )

    @classmethod
    def from_rollout(cls, rollout: Rollout, **options: Any) -> Self:
        """A full storage with the targets of what `jaxroll.collect` returned.

        Args:
          rollout: of T steps; sequences are as long as those whose carries it holds.
          options: as of `create`, such as discount and gae_lambda.

        Example:
          >>> import jaxroll
          >>> env = jaxroll.make_env("CartPole-v1")
          >>> policy = jaxroll.make_policy(env.observation_space, env.action_space)
          >>> def storage(key):
          ...     actor = jaxroll.init_actor(env, policy, key, num_envs=8)
          ...     params = policy.init(key, actor.obs)
          ...     actor, rollout = jaxroll.collect(env, policy, params, actor, num_steps=16)
          ...     return RolloutStorage.from_rollout(rollout, discount=0.99)
          >>> jax.eval_shape(storage, jax.random.key(0)).targets.returns.shape
          (16, 8)
        """
        if not isinstance(rollout, Rollout):
            raise TypeError(
                f"rollout must be a jaxroll.Rollout, got {type(rollout).__name__}. Use "
                f"{cls.__name__}.create(...).insert_data_slice(trajectory) for other data."
            )
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
        transition = check_like("transition", transition, row_like(self.data))
        full = self.is_full

        def write(x: Array, row: Array, index: Array, keep: Array) -> Array:
            # Both slices move an index past the end to the last row, which is then kept.
            options: dict[str, Any] = {"allow_negative_indices": False}
            old = jax.lax.dynamic_index_in_dim(x, index, keepdims=False, **options)
            row = jnp.where(keep, old, row)
            return jax.lax.dynamic_update_index_in_dim(x, row, index, 0, **options)

        initial_carry = self.initial_carry
        self._expects_carry("add(transition, carry)", carry)
        if self.is_recurrent:
            carry = check_like("carry", carry, row_like(initial_carry))
            length = self.sequence_length or self.num_steps
            inside = full | (self.added % length != 0)
            initial_carry = jax.tree.map(
                lambda x, row: write(x, row, self.added // length, inside), initial_carry, carry
            )
        return self.replace(
            data=jax.tree.map(
                lambda x, row: write(x, row, self.added, full), self.data, transition
            ),
            initial_carry=initial_carry,
            added=self.added + 1,
        )

    def insert_data_slice(self, trajectory: Transition, initial_carry: PyTree = None) -> Self:
        """Replace what is stored by a trajectory of up to T steps; a full one is not copied.

        Args:
          trajectory: leaves [T, B, ...]; with fewer steps the rest counts as not written.
          initial_carry: [C, B, ...] the recurrent states at the start of each sequence.
        """
        if not isinstance(trajectory, Transition) or not np.ndim(trajectory.terminated):
            raise TypeError(
                "a trajectory must be a jaxroll.Transition with leaves [T, B, ...], got "
                f"{type(trajectory).__name__}."
            )
        steps = np.shape(trajectory.terminated)[0]
        if not 1 <= steps <= self.num_steps:
            raise ValueError(
                f"a trajectory must have between 1 and num_steps = {self.num_steps} steps, got "
                f"{steps}. Create the storage with num_steps={steps}."
            )
        data = check_like("trajectory", trajectory, row_like(self.data), (steps,))
        if steps < self.num_steps:
            data = jax.tree.map(
                lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, 0, 0), self.data, data
            )
        self._expects_carry("insert_data_slice(trajectory, initial_carry)", initial_carry)
        carry = self.initial_carry
        if self.is_recurrent:
            carry = check_like("initial_carry", initial_carry, carry)
        return self.replace(
            data=vary_leaves(data, self.data),
            initial_carry=vary_leaves(carry, self.initial_carry),
            added=vary_as(np.asarray(steps, np.int32), like=self.added),
            lost=self.dropped,
            targets_at=vary_as(np.full((), _NONE, np.int32), like=self.targets_at),
        )

    # Targets.

    def compute_returns_and_advantages(self, last_values: PyTree) -> Self:
        """Raw advantages and returns of every row, by `jaxroll.estimators.gae`.

        Args:
          last_values: [B] V of the observation after the last written step; a dict for streams.
        """
        data = self.data
        last_values = self._last_values(last_values)
        # Rows that are not written are not experience, and last_values takes their place.
        written = self._written()
        valid = written if data.valid is None else written & data.valid
        values = jax.tree.map(
            lambda v, last: jnp.where(written, v, last[None]), data.value, last_values
        )
        streams = _streams(data)

        def targets(name: str | None) -> Targets:
            def of(x: PyTree) -> Any:
                return x if name is None or x is None else x[name]

            def ends(flags: Array | None) -> Array | None:
                return (
                    flags if flags is None or self.episodic is None else flags & of(self.episodic)
                )

            return estimators.gae(
                of(data.reward),
                of(values),
                of(last_values),
                ends(data.terminated),
                ends(data.truncated),
                of(data.bootstrap_value),
                of(self.discount),
                of(self.gae_lambda),
                valid=valid,
            )

        if streams is None:
            result = targets(None)
        else:
            each = {name: targets(name) for name in streams}
            result = Targets(
                advantages={name: t.advantages for name, t in each.items()},
                returns={name: t.returns for name, t in each.items()},
            )
        return self.with_targets(result)

    def with_targets(self, targets: Targets) -> Self:
        """The same rows with these targets: what a `before_gradients` of your own returns.

        Args:
          targets: [T, B] advantages and returns, or dicts of streams.
        """
        return self.replace(targets=vary_leaves(targets, self.targets), targets_at=self.added)

    def _implied(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Another discount, λ or episodic makes the targets stale."""
        changes = super()._implied(changes)
        if changes.keys() & set(self.parameters) and not changes.keys() & {"targets", "targets_at"}:
            changes["targets_at"] = vary_as(np.full((), _NONE, np.int32), like=self.targets_at)
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
        stored = self.sequence_length or self.num_steps
        if self.is_recurrent and row_plan.sequence_length not in (None, stored):
            raise ValueError(
                f"the carries are stored every {stored} steps, so sequences must have that length, "
                f"got {row_plan.sequence_length}. Create the storage with sequence_length="
                f"{row_plan.sequence_length}."
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
        weights = jnp.where(is_written, row.weights, 0)
        if picked.valid is not None:
            weights = jnp.where(picked.valid, weights, 0)
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
        weights = self._written().astype(jnp.float32)
        if self.data.valid is not None:
            weights = jnp.where(self.data.valid, weights, 0)
        return Minibatch(self.data, self.targets, weights, self.initial_carry)

    def _written(self) -> Array:
        """[T, B] bool: which rows are written."""
        rows = jnp.arange(self.num_steps)[:, None] < self.position
        return jnp.broadcast_to(rows, (self.num_steps, self.num_envs))

    # Moving on.

    def update(self) -> Self:
        """Empty again: the next add writes row 0."""
        return self.replace(
            added=jnp.zeros_like(self.added),
            lost=self.dropped,
            targets_at=jnp.full_like(self.targets_at, _NONE),
        )

    def reset(self) -> Self:
        """Empty, and all counters 0."""
        return self.update().replace(lost=jnp.zeros_like(self.lost))

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
                f"{dropped} steps were added past the end and dropped: the storage has num_steps = "
                f"{self.num_steps} rows. Call storage.update() after each rollout, or create it "
                f"with more rows."
            )
        if not partial and position < self.num_steps:
            raise ValueError(
                f"the storage is not full: {position} of {self.num_steps} steps are written and "
                "the rest weighs 0. Add the rest, or use check(partial=True) if that is meant."
            )
        self._check_targets()
        checked = {"value": self.data.value, "reward": self.data.reward, "targets": self.targets}
        check_finite(checked, np.asarray(self.contents().weights) > 0, "environment")
        return self

    def _last_values(self, last_values: PyTree) -> PyTree:
        value = self.data.value
        if jax.tree.structure(last_values) != jax.tree.structure(value):
            got = sorted(last_values) if isinstance(last_values, dict) else "a single array"
            raise ValueError(
                f"last_values must have the streams of value, "
                f"{_streams(self.data) or 'a single array'}, got {got}."
            )

        def convert(last: Any, v: Array) -> Array:
            check_array("last_values", last)
            if np.shape(last) != v.shape[1:]:
                raise ValueError(
                    f"last_values must have the shape {list(v.shape[1:])}, one for each "
                    f"environment, got {list(np.shape(last))}."
                )
            return jnp.asarray(last, v.dtype)

        return jax.tree.map(convert, last_values, value)

    def _expects_carry(self, call: str, carry: PyTree) -> None:
        given = bool(jax.tree.leaves(carry))
        if self.is_recurrent and not given:
            raise ValueError(
                f"this storage was created with an initial_carry: use {call} with the recurrent "
                "state from before the step."
            )
        if given and not self.is_recurrent:
            raise ValueError(
                f"{call} got a carry, but this storage was created without one. Write "
                "create(..., initial_carry=carry), or leave the carry out."
            )


def _streams(transition: Transition) -> list[str] | None:
    """The names of the value streams; None for a single one."""
    if not isinstance(transition.value, dict):
        return None
    names = sorted(transition.value)
    for field in ("reward", "bootstrap_value"):
        given = getattr(transition, field)
        if given is None and field == "bootstrap_value":
            continue
        if not isinstance(given, dict) or sorted(given) != names:
            got = sorted(given) if isinstance(given, dict) else "a single array"
            raise ValueError(
                f"value has the streams {names}, so {field} must be a dict of the same keys, got "
                f"{got}."
            )
    return names
