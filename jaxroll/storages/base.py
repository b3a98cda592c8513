"""Storage: the interface of everything that holds experience, and what follows from it.

A storage is a frozen pytree; each method returns a new one. Its structure, shapes and dtypes never
change, so it can be the carry of a scan and can be donated. `sample` reads, `update` moves on.

What only data decide (too many adds, sampling too early, NaN) cannot raise inside jit: it is
counted in a leaf, and `check` raises outside.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jaxroll.checks import check_flag, unknown_name
from jaxroll.storages.arrays import as_parameter
from jaxroll.storages.minibatches import MinibatchPlan
from jaxroll.types import Array, Node, PyTree, has_data, tree_nbytes


class Storage(Node, abc.ABC):
    """The interface that agents use and that users extend.

    A storage of your own defines `create`, `add`, `insert_data_slice`, `before_gradients`, `plan`,
    `minibatch`, `contents`, `update`, `check` and `fill`; the rest follows. List the names of
    changeable hyperparameters in `parameters`.

    Example, what any storage can do because it is one:
      >>> from jaxroll import RolloutStorage, Transition
      >>> step = Transition(obs=np.zeros((2, 3)), action=np.zeros(2), reward=np.zeros(2),
      ...                   terminated=np.zeros(2, bool), value=np.zeros(2))
      >>> storage = RolloutStorage.create_factory(num_steps=4, gae_lambda=0.9)(step)
      >>> isinstance(storage, Storage), storage.parameters
      (True, ('discount', 'gae_lambda', 'episodic'))
      >>> storage = storage.insert_transition(step).update_storage_parameter("discount", 0.5)
      >>> storage.get_all_buffer_data(data_to_cpu=True).weights.sum()
      np.float32(2.0)
      >>> storage = storage.before_gradients(np.zeros(2))
      >>> batches = storage.generate_batches(jax.random.key(0), num_mini_batch=2, num_epochs=3)
      >>> len(batches), {batch.transition.obs.shape for batch in batches}
      (6, {(4, 3)})
    """

    parameters: ClassVar[tuple[str, ...]] = ()
    rules: ClassVar[dict[str, str]] = {}  # parameter → rule of `jaxroll.checks.check_number`

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        init: Callable[..., None] = cls.__init__

        @functools.wraps(init)
        def with_hint(self: Self, *args: Any, **fields: Any) -> None:
            try:
                init(self, *args, **fields)
            except TypeError as error:
                raise TypeError(
                    f"{error}. Make a new storage with {cls.__name__}.create(example, num_steps, "
                    "...), where example is one jaxroll.Transition with leaves [B, ...]."
                ) from None

        cls.__init__ = with_hint

    # What a storage defines.

    @classmethod
    @abc.abstractmethod
    def create(cls, example: Any, num_steps: int) -> Self:
        """Allocate from one sample, leaves [B, ...] of any structure and dtype."""

    @abc.abstractmethod
    def add(self, transition: Any, *args: Any, **kwargs: Any) -> Self:
        """Write what was collected next, with what else this storage keeps of it."""

    @abc.abstractmethod
    def insert_data_slice(self, trajectory: Any, initial_carry: PyTree = None) -> Self:
        """Write a whole trajectory, leaves [T, B, ...]."""

    @abc.abstractmethod
    def before_gradients(self, last_values: PyTree) -> Self:
        """Called before the first minibatch: returns and advantages, if the storage has them."""

    @abc.abstractmethod
    def plan(self, key: jax.Array | None, *args: Any, **options: Any) -> MinibatchPlan:
        """Which rows go into which minibatch; see `jaxroll.storages.minibatches.plan`."""

    @abc.abstractmethod
    def minibatch(self, row: MinibatchPlan) -> Any:
        """Gather the minibatch that one row of the plan names."""

    @abc.abstractmethod
    def contents(self) -> Any:
        """Everything that is stored; rows that are not written weigh 0."""

    @abc.abstractmethod
    def update(self) -> Self:
        """Called after the last minibatch: forget what was sampled; counters of faults stay."""

    @abc.abstractmethod
    def check(self) -> Self:
        """Raise, outside jit, if what is stored is not fit to learn from; else return self."""

    @property
    @abc.abstractmethod
    def fill(self) -> tuple[Array, int, str]:
        """(how many are written, of how many, what they are), for `repr`."""

    # What follows from it.

    @classmethod
    def create_factory(cls, num_steps: int | None = None, **options: Any) -> Callable[[Any], Self]:
        """A function from one sample to a storage, with everything else decided now.

        Two with equal options are equal, so that agents made alike share one compilation.
        """
        if num_steps is not None:
            options = {"num_steps": num_steps, **options}
        parameters = inspect.signature(cls.create).parameters
        known = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD][1:]
        for name in options:
            if name not in known and len(known) == len(parameters) - 1:
                raise TypeError(unknown_name("option", name, known, cls.__name__))
        return StorageFactory(cls, options)

    def insert_transition(self, sample: Any) -> Self:
        """Another name of `add`."""
        return self.add(sample)

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> Any:
        """Everything that is stored, as numpy arrays with `data_to_cpu`; the storage is unchanged.

        Returns:
          leaves [T, B, ...], with weights that are 0 for rows not written.
        """
        contents = self.contents()
        return jax.device_get(contents) if check_flag("data_to_cpu", data_to_cpu) else contents

    def after_gradients(self, info: dict[str, Any]) -> tuple[Self, dict[str, Any]]:
        """`update`, and `info` extended by what the storage counts.

        Returns:
          (storage, info): a new dict; the one given is not changed.
        """
        return self.update(), {**info, **self.counters()}

    def counters(self) -> dict[str, Array]:
        """What the storage counts, by name, for logs."""
        return {}

    def generate_batches(
        self, key: jax.Array | None = None, num_mini_batch: int | None = None, **options: Any
    ) -> Batches:
        """Minibatches for all epochs: iterate over them in Python, or `.scan` them inside jit.

        Args:
          key: for the shuffle.
          num_mini_batch: M.
          options: the other arguments of `plan`.
        """
        return Batches(self, self.plan(key, num_mini_batch=num_mini_batch, **options))

    def reset(self) -> Self:
        """Empty, and all counters 0."""
        return self.update()

    def _check_targets(self) -> None:
        """Called before sampling: raise if targets are missing and that is known."""

    def update_storage_parameter(self, name: str, value: Any) -> Self:
        """A storage with one hyperparameter changed; nothing is compiled again."""
        if name not in self.parameters:
            raise ValueError(unknown_name("parameter", name, self.parameters, type(self).__name__))
        rule = self.rules.get(name)
        return self.replace(**{name: as_parameter(name, value, getattr(self, name), rule)})

    def _implied(self, changes: dict[str, Any]) -> dict[str, Any]:
        changes = dict(changes)
        for name in changes.keys() & set(self.parameters):
            value, like = changes[name], getattr(self, name)
            if isinstance(like, dict) and not isinstance(value, dict):
                like = next(iter(like.values()))  # one number for all streams
            changes[name] = as_parameter(name, value, like, self.rules.get(name))
        return changes

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return tree_nbytes(self)

    def _summary(self) -> list[str]:
        written, capacity, what = self.fill
        # A storage may count what came after it was full, too.
        known = np.minimum(written, capacity).tolist() if has_data(written) else "?"
        return [f"{known} of {capacity} {what}"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StorageFactory:
    """What `create_factory` gives; compares by the storage's class and the options' values."""

    kind: type[Storage]
    options: dict[str, Any]

    def __call__(self, example: Any) -> Any:
        """The storage for samples like this one, leaves [B, ...]."""
        return self.kind.create(example, **self.options)

    def _identity(self) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(self.options)
        return self.kind, structure, *map(_identity, leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageFactory) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.kind.__name__}.create_factory({options})"


def _identity(option: Any) -> Any:
    """Something hashable that is equal for equal options, arrays included."""
    if isinstance(option, np.ndarray | np.generic | jax.Array) and has_data(option):
        array = np.asarray(option)
        return array.shape, array.dtype.str, array.tobytes()
    is_hashable = getattr(type(option), "__hash__", None) is not None
    return (type(option), option) if is_hashable else id(option)


class Batches:
    """Minibatches of a storage, gathered one at a time: an iterable, and a scan inside jit."""

    def __init__(self, storage: Storage, plan: MinibatchPlan):
        storage._check_targets()
        self.storage = storage
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self)):
            yield _minibatch(self.storage, jax.tree.map(lambda x, i=i: x[i], self.plan))

    def scan(self, step: Callable[[Any, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
        """`jax.lax.scan` of `step(carry, minibatch) -> (carry, output)` over all minibatches."""
        return jax.lax.scan(lambda c, row: step(c, self.storage.minibatch(row)), carry, self.plan)

    def stacked(self) -> Any:
        """All minibatches at once, leaves [E·M, N, ...]; takes as much memory as all of them."""
        return jax.vmap(self.storage.minibatch)(self.plan)


@functools.partial(jax.jit, donate_argnums=0)
def add_donated(storage: Any, *args: Any, **kwargs: Any) -> Any:
    """`storage.add`, for loops in Python: compiled, and the old storage's memory is written to.

    Outside jit a plain `add` copies the whole storage for each step. This one writes in place,
    and for that takes the storage it is given: use only the one that it returns.

    Example:
      >>> from jaxroll import RolloutStorage, Transition
      >>> step = Transition(obs=np.zeros((2, 3)), action=np.zeros(2), reward=np.zeros(2),
      ...                   terminated=np.zeros(2, bool), value=np.zeros(2))
      >>> storage = RolloutStorage.create(step, num_steps=4)
      >>> for _ in range(4):
      ...     storage = add_donated(storage, step)
      >>> bool(storage.is_full)
      True
    """
    return storage.add(*args, **kwargs)


@jax.jit
def _minibatch(storage: Storage, row: MinibatchPlan) -> Any:
    return storage.minibatch(row)
