"""The pytrees that the parts of jaxroll hand to each other.

Axes: T time, B environments, N flat batch, A logical actors, S truncated steps per environment.
Arrays are time-major, [T, B, ...]; a field that is None is absent and costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct

Array = Any  # jax.Array, numpy.ndarray or a tracer
PyTree = Any
_MAX_LEAVES = 8  # of a dict or tuple that `repr` prints one by one


def as_leaf(value: Any, like: Any = None) -> Any:
    """Turn Python numbers into arrays, so that changing one never costs a second trace.

    Numpy, not jax.numpy: making a hyperparameter touches no device.

    Args:
      value: any pytree; only Python and numpy scalars in it are changed.
      like: an array whose dtype the result takes; None: float32, int32 or bool.

    Example:
      >>> as_leaf(0.99).dtype, as_leaf(1, like=as_leaf(0.5)).dtype
      (dtype('float32'), dtype('float32'))
    """
    dtype = getattr(like, "dtype", None)

    def convert(x: Any) -> Any:
        if isinstance(x, bool | int | float | np.number | np.bool_):
            kind = np.asarray(x).dtype.kind
            default = {"f": np.float32, "i": np.int32, "u": np.uint32}.get(kind)
            return np.asarray(x, dtype or default)
        return x

    return jax.tree.map(convert, value)


class Node(struct.PyTreeNode):
    """A frozen pytree whose `replace` keeps dtypes, and that prints shapes instead of numbers.

    Subclass it with annotated fields; `flax.struct.field(pytree_node=False)` marks what is
    static. A Python number given to `replace` becomes an array of the old leaf's dtype.

    Example:
      >>> class Point(Node):
      ...     x: Any
      ...     y: Any = None
      >>> Point(as_leaf(1.0)).replace(x=2).x
      array(2., dtype=float32)
      >>> Point(x=as_leaf(0.5), y=np.zeros((100, 100)))
      Point(80.0 kB, x: 0.5, y: float64[100, 100])
    """

    def __init_subclass__(cls, **kwargs: Any):
        own_repr = "__repr__" in cls.__dict__
        super().__init_subclass__(**kwargs)
        if not own_repr:
            del cls.__repr__  # the dataclass's, with every number in it
        dynamic = {f.name for f in _fields(cls) if f.metadata.get("pytree_node", True)}

        def replace(self, **changes: Any):
            """A copy with these fields changed; numbers take the dtype of what they replace."""
            changes = self._implied(changes)
            for name in changes.keys() & dynamic:
                changes[name] = as_leaf(changes[name], like=getattr(self, name))
            return dataclasses.replace(self, **changes)

        cls.replace = replace  # pyright: ignore[reportAttributeAccessIssue]

    def _implied(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Called by `replace`: the changes, with those of other fields that they bring about."""
        return changes

    def _summary(self) -> list[str]:
        """Called by `repr` if all leaves are arrays: what to print first."""
        return []

    def __repr__(self) -> str:
        head = []
        leaves = jax.tree.leaves(self)
        if leaves and all(map(_is_array, leaves)):
            head = [*self._summary(), format_bytes(tree_nbytes(self))]
        lines = [*self._lines()]
        one_line = f"{type(self).__name__}({', '.join([*head, *lines])})"
        if len(one_line) <= 88:
            return one_line
        return "\n  ".join([f"{type(self).__name__}({', '.join(head)}", *lines]) + ")"

    def _lines(self, prefix: str = "") -> Iterator[str]:
        """One line for each static field and leaf; a dict of many leaves has one."""
        for field in _fields(type(self)):
            name, value = prefix + field.name, getattr(self, field.name)
            leaves = jax.tree.leaves_with_path(value)
            if not field.metadata.get("pytree_node", True):
                yield f"{name}={repr(value)[:60]}"
            elif isinstance(value, Node):
                yield from value._lines(f"{name}.")
            elif len(leaves) > _MAX_LEAVES and all(_is_array(x) for _, x in leaves):
                yield f"{name}: {len(leaves)} arrays, {format_bytes(tree_nbytes(value))}"
            else:
                for path, x in leaves:
                    yield f"{name}.{path_name(path)}: {_leaf_repr(x)}".replace(".:", ":", 1)


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]


def path_name(path: Any) -> str:
    """A leaf's path as "a.b.c"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def has_data(x: Any) -> bool:
    """Whether the numbers of an array can be read here and now."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return not isinstance(x, jax.Array) or (x.is_fully_addressable and not x.is_deleted())


def tree_nbytes(tree: PyTree) -> int:
    """Bytes of all arrays in a pytree."""

    def nbytes(x: Any) -> int:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.eval_shape(jax.random.key_data, x)
        return math.prod(x.shape) * x.dtype.itemsize

    return sum(map(nbytes, jax.tree.leaves(tree)))


def format_bytes(nbytes: float) -> str:
    """Bytes with a unit.

    Example:
      >>> format_bytes(12), format_bytes(3_450_000)
      ('12 B', '3.5 MB')
    """
    unit = "B"
    for larger in ("kB", "MB", "GB"):
        if nbytes < 1000:
            break
        nbytes, unit = nbytes / 1000, larger
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _leaf_repr(x: Any) -> str:
    if not _is_array(x):
        return repr(x)[:60]
    is_number = x.shape == () and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    if is_number and has_data(x):
        number = np.asarray(x).item()
        return f"{number:.6g}" if isinstance(number, float) else str(number)
    return f"{x.dtype}{list(x.shape)}"


class Transition(Node):
    """One step of B environments, leaves [B, ...]; with [T, B, ...] leaves, a trajectory.

    A field left at None is not stored. `value` may be a dict of streams (for instance
    "extrinsic" and "intrinsic"); `reward` and `bootstrap_value` are then dicts of the same keys.

    Attributes:
      obs: [B, ...] what the policy saw.
      action: [B, ...] what it did.
      reward: [B] what that earned.
      terminated: [B] bool, the episode ended by itself: the successor is worth 0.
      truncated: [B] bool, it was cut short: the successor is worth bootstrap_value.
      log_prob: [B] of the action, under the policy that acted.
      value: [B] V(obs).
      bootstrap_value: [B] V(final observation), read only where truncated.
      is_first: [B] bool, obs starts an episode: a recurrent state restarts here.
      valid: [B] bool, False where the row is not experience.
      extras: [B, ...] anything else.

    Example:
      >>> step = Transition(obs=np.zeros((8, 4)), action=np.zeros(8, int), reward=np.zeros(8),
      ...                   terminated=np.zeros(8, bool), value=np.zeros(8))
      >>> step.obs.shape
      (8, 4)
    """

    obs: PyTree
    action: PyTree
    reward: PyTree
    terminated: Array
    truncated: Array | None = None
    log_prob: Array | None = None
    value: PyTree = None
    bootstrap_value: PyTree = None
    is_first: Array | None = None
    valid: Array | None = None
    extras: PyTree = None


class Targets(Node):
    """What the learner aims at.

    Attributes:
      advantages: [T, B], or a dict of streams.
      returns: [T, B], or a dict of streams.

    Example:
      >>> advantages, values = np.ones((16, 8)), np.full((16, 8), 2.0)
      >>> Targets(advantages=advantages, returns=advantages + values).returns.shape
      (16, 8)
    """

    advantages: PyTree
    returns: PyTree


class Minibatch(Node):
    """Rows picked from a storage: [N, ...] steps, or [L, N, ...] sequences, time first.

    Attributes:
      transition: the steps.
      targets: their advantages and returns.
      weights: [N] or [L, N], 0 where a row is padding, invalid or not written.
      initial_carry: [N, ...] the recurrent state before each sequence.

    Example, the weighted mean of what a loss would read:
      >>> step = Transition(obs=np.zeros((3, 4)), action=np.zeros(3, int), reward=np.zeros(3),
      ...                   terminated=np.zeros(3, bool))
      >>> targets = Targets(advantages=np.array([1.0, 3.0, 9.0]), returns=np.zeros(3))
      >>> batch = Minibatch(step, targets, weights=np.array([1.0, 1.0, 0.0]))
      >>> float((batch.targets.advantages * batch.weights).sum() / batch.weights.sum())
      2.0
    """

    transition: Transition
    targets: Targets | None
    weights: Array
    initial_carry: PyTree = None


class PolicyOutput(Node):
    """What a policy says of B observations.

    Attributes:
      distribution: over actions; has sample, log_prob, entropy, mode and kl.
      value: [B], or a dict of streams, or None.
      extras: stored with the transition.

    Example:
      >>> from jaxroll.distributions import Categorical
      >>> output = PolicyOutput(Categorical(np.zeros((8, 2))), value=np.zeros(8))
      >>> output.distribution.mode().shape, output.value.shape
      ((8,), (8,))
    """

    distribution: Any
    value: PyTree
    extras: PyTree = None


class TimeStep(Node):
    """What one step of one environment gave, auto-reset done; leaves [B, ...] once vmapped.

    Attributes:
      obs: to act on next: the reset observation after an end.
      reward: of the step.
      terminated: bool, the episode ended by itself.
      truncated: bool, it was cut short.
      final_obs: the successor before any reset; equals obs unless an episode ended.
      info: a dict of anything else.

    Example, a step that ran into the time limit:
      >>> step = TimeStep(obs=np.array([0.0]), reward=np.float32(1), terminated=np.False_,
      ...                 truncated=np.True_, final_obs=np.array([9.0]))
      >>> step.obs.item(), step.final_obs.item()  # where the next episode starts, where this ended
      (0.0, 9.0)
    """

    obs: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    final_obs: PyTree
    info: PyTree = struct.field(default_factory=dict)


class FinalRows(Node):
    """The final observations of truncated steps, at most S for each environment, in time order.

    Attributes:
      obs: [S, B, ...].
      carry: [S, B, ...] the recurrent state with which to value obs.
      step: [S, B] int32 the step that was truncated; T where the row is empty.
      overflow: [] int32 truncated steps without a row, which bootstrap from V(obs).
    """

    obs: PyTree
    carry: PyTree
    step: Array
    overflow: Array


class EpisodeSums(Node):
    """Episodes that ended within a rollout, reduced on the device.

    Attributes:
      count: [] int32.
      return_sum: [] float32.
      length_sum: [] float32: an int32 would wrap at 2,000 steps of a million environments.
    """

    count: Array
    return_sum: Array
    length_sum: Array


class EpisodeStatistics(Node):
    """The running episode of each environment.

    Attributes:
      episode_return: [B] float32 so far.
      episode_length: [B] int32 so far.
    """

    episode_return: Array
    episode_length: Array


class ActorState(Node):
    """Everything an actor needs to go on; the next observation is here, not in a storage.

    Attributes:
      env: [B, ...] environment states.
      obs: [B, ...] to act on next.
      carry: [B, ...] recurrent state; () for a feed-forward policy.
      is_first: [B] bool, obs starts an episode.
      key: the actor's own key; rollout u draws from fold_in(key, u).
      num_rollouts: [] int32, u.
      statistics: of the running episodes.
      reward_sums: [B] discounted rewards so far, where rewards are scaled.
    """

    env: PyTree
    obs: PyTree
    carry: PyTree
    is_first: Array
    key: jax.Array
    num_rollouts: Array
    statistics: EpisodeStatistics
    reward_sums: Array | None = None


class Rollout(Node):
    """What a collector hands over: T steps of B environments, and the state after the last one.

    Attributes:
      transition: [T, B, ...].
      last_obs: [B, ...] the observation after the last step.
      last_is_first: [B] bool, last_obs starts an episode.
      last_carry: [B, ...] the recurrent state after the last step.
      last_value: [B] V(last_obs), or a dict of streams.
      initial_carry: [C, B, ...] the recurrent state before steps 0, L, 2L, … with L = T / C.
      final: the final observations of truncated steps, or None.
      episodes: those that ended.
    """

    transition: Transition
    last_obs: PyTree
    last_is_first: Array
    last_carry: PyTree
    last_value: PyTree
    initial_carry: PyTree
    final: FinalRows | None
    episodes: EpisodeSums
