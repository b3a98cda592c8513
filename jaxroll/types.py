"""The data that rooms hand to each other: pytrees with shapes, no logic.

Axes: T time, B environments, N flat batch, A logical actors, S final rows per environment.
Arrays are time-major, [T, B, ...]; a field that is None is absent and costs nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import struct

Array = Any  # jax.Array, numpy.ndarray or a tracer
PyTree = Any


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
    """A frozen pytree whose `replace` keeps the dtype of the leaf that it replaces.

    Subclass it with annotated fields; `flax.struct.field(pytree_node=False)` marks what is
    static. A Python number given to `replace` becomes an array of the old leaf's dtype.

    Example:
      >>> class Point(Node):
      ...     x: Any
      >>> Point(as_leaf(1.0)).replace(x=2).x
      array(2., dtype=float32)
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        dynamic = {
            f.name
            for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
            if f.metadata.get("pytree_node", True)
        }

        def replace(self, **changes: Any):
            """A copy with these fields changed; numbers take the dtype of what they replace."""
            for name in changes.keys() & dynamic:
                changes[name] = as_leaf(changes[name], like=getattr(self, name))
            return dataclasses.replace(self, **self._implied(changes))

        cls.replace = replace  # pyright: ignore[reportAttributeAccessIssue]

    def _implied(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Called by `replace`: the changes, with those of other fields that they bring about."""
        return changes


class Transition(Node):
    """One step of B environments, leaves [B, ...]; with [T, B, ...] leaves, a trajectory.

    A field left at None is not stored. `value` may be a dict of streams (for instance
    "extrinsic" and "intrinsic"); `reward` and `bootstrap_value` are then dicts of the same keys.

    Example:
      >>> step = Transition(obs=np.zeros((8, 4)), action=np.zeros(8, int), reward=np.zeros(8),
      ...                   terminated=np.zeros(8, bool), value=np.zeros(8))
      >>> step.obs.shape
      (8, 4)
    """

    obs: PyTree  # [B, ...] what the policy saw
    action: PyTree  # [B, ...] what it did
    reward: PyTree  # [B] what that earned
    terminated: Array  # [B] bool: the successor is worth 0
    truncated: Array | None = None  # [B] bool: cut short, the successor is worth bootstrap_value
    log_prob: Array | None = None  # [B] of action, under the policy that acted
    value: PyTree = None  # [B] V(obs)
    bootstrap_value: PyTree = None  # [B] V(final observation); read only where truncated
    is_first: Array | None = None  # [B] bool: obs starts an episode, the carry restarts here
    valid: Array | None = None  # [B] bool: False where the row is not experience
    extras: PyTree = None  # [B, ...] anything else


class Targets(Node):
    """What the learner aims at, [T, B] each (or dicts of streams).

    Example:
      >>> advantages, values = np.ones((16, 8)), np.full((16, 8), 2.0)
      >>> Targets(advantages=advantages, returns=advantages + values).returns.shape
      (16, 8)
    """

    advantages: PyTree
    returns: PyTree


class Minibatch(Node):
    """Rows picked from a storage: [N, ...] steps, or [L, N, ...] sequences, time first.

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
    weights: Array  # [N] or [L, N]; 0 where a row is padding, invalid or unwritten
    initial_carry: PyTree = None  # [N, ...] the recurrent state before each sequence


class PolicyOutput(Node):
    """What a policy says of B observations.

    Example:
      >>> from jaxroll.distributions import Categorical
      >>> output = PolicyOutput(Categorical(np.zeros((8, 2))), value=np.zeros(8))
      >>> output.distribution.mode().shape, output.value.shape
      ((8,), (8,))
    """

    distribution: Any  # has sample, log_prob, entropy, mode, kl
    value: PyTree  # [B], or a dict of streams, or None
    extras: PyTree = None  # stored with the transition


class TimeStep(Node):
    """What one step of one environment gave, auto-reset done; leaves [B, ...] once vmapped.

    Example, a step that ran into the time limit:
      >>> step = TimeStep(obs=np.array([0.0]), reward=np.float32(1), terminated=np.False_,
      ...                 truncated=np.True_, final_obs=np.array([9.0]))
      >>> step.obs.item(), step.final_obs.item()  # where the next episode starts, where this ended
      (0.0, 9.0)
    """

    obs: PyTree  # what to act on next: the reset observation after an end
    reward: Array
    terminated: Array
    truncated: Array
    final_obs: PyTree  # the successor before any reset; equals obs unless an episode ended
    info: PyTree = struct.field(default_factory=dict)


class FinalRows(Node):
    """The final observations of truncated steps, at most S for each environment.

    Rows are written in order of time. An empty row has `step` = T, past every step.
    """

    obs: PyTree  # [S, B, ...]
    carry: PyTree  # [S, B, ...] the recurrent state with which to value obs
    step: Array  # [S, B] int32 the step that was truncated
    overflow: Array  # [] int32 truncated steps without a row that bootstrap from V(obs)


class EpisodeSums(Node):
    """Episodes that ended within a rollout, reduced on the device."""

    count: Array  # [] int32
    return_sum: Array  # [] float32
    length_sum: Array  # [] float32: 2**31 is 2,000 steps of each of a million environments


class EpisodeStatistics(Node):
    """The running episode of each environment."""

    episode_return: Array  # [B] float32 so far
    episode_length: Array  # [B] int32 so far


class ActorState(Node):
    """Everything an actor needs to go on: the next observation lives here, not in a storage."""

    env: PyTree  # [B, ...] environment states
    obs: PyTree  # [B, ...] to act on next
    carry: PyTree  # [B, ...] recurrent state; () for a feed-forward policy
    is_first: Array  # [B] bool: obs starts an episode
    key: jax.Array  # the actor's own key; rollout u draws from fold_in(key, u)
    num_rollouts: Array  # [] int32: u
    statistics: EpisodeStatistics
    reward_sums: Array | None = None  # [B] discounted rewards so far, where rewards are scaled


class Rollout(Node):
    """What a collector hands over: T steps of B environments and what stands after them."""

    transition: Transition  # [T, B, ...]
    last_obs: PyTree  # [B, ...] the observation after the last step
    last_is_first: Array  # [B] bool
    last_carry: PyTree  # [B, ...]
    last_value: PyTree  # [B] V(last_obs), or a dict of streams
    initial_carry: PyTree  # [C, B, ...] the carry before steps 0, L, 2L, … with L = T / C
    final: FinalRows | None
    episodes: EpisodeSums
