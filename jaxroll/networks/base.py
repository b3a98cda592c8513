"""What a policy is, to everything else in the library.

A policy is a value: frozen, hashable, compared by content, with no arrays in it. Parameters and
the recurrent state (the carry) are pytrees that it is given. Any network library fits: subclass
`Policy`, or hand two functions to `Policy.from_functions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxroll import spaces
from jaxroll.distributions import sample
from jaxroll.types import Array, PolicyOutput, PyTree


class Policy:
    """Observations in, `PolicyOutput` out.

    Subclass it as a frozen dataclass with at least `init` and `apply`.

    Two policies that do the same should be equal and have the same hash (a frozen dataclass of
    plain fields does): they are static arguments of compiled programs, and equal ones share a
    compilation.

    Example:
      >>> from jaxroll.distributions import Categorical
      >>> @dataclasses.dataclass(frozen=True)
      ... class Linear(Policy):
      ...     num_actions: int
      ...
      ...     def init(self, key, obs):
      ...         return 0.01 * jax.random.normal(key, (obs.shape[-1], self.num_actions + 1))
      ...
      ...     def apply(self, params, carry, obs, is_first):
      ...         y = obs @ params
      ...         return carry, PolicyOutput(Categorical(y[:, 1:]), y[:, 0])
      >>> policy, obs = Linear(2), jnp.ones((8, 4))
      >>> params = policy.init(jax.random.key(0), obs)
      >>> policy.value(params, policy.initial_carry(8), obs, jnp.zeros(8, bool)).shape
      (8,)
    """

    @property
    def has_separate_value(self) -> bool:
        """Whether `value` is a computation of its own, which shares nothing with the distribution.

        A collector may then ask for the values of many steps at once, if there is no carry.
        """
        return False

    @staticmethod
    def from_functions(
        init: Callable[[jax.Array, PyTree], PyTree],
        apply: Callable[[PyTree, PyTree, PyTree, Array], tuple[PyTree, PolicyOutput]],
        initial_carry: Callable[[int], PyTree] | None = None,
    ) -> Policy:
        """A policy made of functions, for instance around an nnx or Equinox model.

        Args:
          init: (key, obs [B, ...]) -> params.
          apply: (params, carry, obs [B, ...], is_first [B]) -> (carry, PolicyOutput); it restarts
            the carry where is_first.
          initial_carry: batch_size -> carry, leaves [B, ...]; None: feed-forward.

        It is equal to another one made of the same functions: define them once, at module level.
        """
        return FunctionPolicy(init, apply, initial_carry)

    def init(self, key: jax.Array, obs: PyTree) -> PyTree:
        """Fresh parameters; obs is an example with a leading batch axis."""
        raise NotImplementedError

    def apply(
        self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """(next carry, output) of one step; leaves [B, ...]. Restarts the carry where is_first."""
        raise NotImplementedError

    def initial_carry(self, batch_size: int) -> PyTree:
        """The recurrent state at the start of an episode, leaves [B, ...]; () if feed-forward."""
        return ()

    def unroll(
        self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """(carry after, outputs) of T steps; leaves [T, B, ...], the carry [B, ...].

        Equals a scan of `apply`. A feed-forward policy sees all T·B rows in one call.
        """
        if jax.tree.leaves(carry):

            def step(carry: PyTree, inputs: tuple) -> tuple[PyTree, PolicyOutput]:
                return self.apply(params, carry, *inputs)

            return jax.lax.scan(step, carry, (obs, is_first))
        _, output = self.apply(params, carry, merge_time(obs), merge_time(is_first))
        return carry, split_time(output, is_first.shape)

    def value(self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array) -> PyTree:
        """V alone, [B] or a dict of streams; override it where the actor can be skipped."""
        return self.apply(params, carry, obs, is_first)[1].value

    def act_extras(self, params: PyTree, output: PolicyOutput, action: PyTree) -> PyTree:
        """What a collector stores beside the action, leaves [B, ...]; default: output.extras."""
        return output.extras


@dataclasses.dataclass(frozen=True)
class FunctionPolicy(Policy):
    """Made by `Policy.from_functions`."""

    init_function: Callable[..., PyTree]
    apply_function: Callable[..., tuple[PyTree, PolicyOutput]]
    carry_function: Callable[[int], PyTree] | None = None

    def init(self, key: jax.Array, obs: PyTree) -> PyTree:
        """Calls the function given."""
        return self.init_function(key, obs)

    def apply(
        self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """Calls the function given."""
        return self.apply_function(params, carry, obs, is_first)

    def initial_carry(self, batch_size: int) -> PyTree:
        """Calls the function given; () without one."""
        return () if self.carry_function is None else self.carry_function(batch_size)


def merge_time(tree: PyTree) -> PyTree:
    """[T, B, ...] → [T·B, ...]; flat index t·B + b."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def split_time(tree: PyTree, shape: tuple[int, ...]) -> PyTree:
    """[T·B, ...] → [T, B, ...]."""
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), tree)


def check_policy(
    policy: Policy, obs: PyTree, action_space: spaces.Space, params: PyTree = None
) -> PolicyOutput:
    """The shapes of the policy's output; raise if it does not fit. Nothing is computed.

    Args:
      policy: any `Policy`.
      obs: an example, leaves [B, ...] (arrays or `jax.ShapeDtypeStruct`).
      action_space: what the policy acts in.
      params: the shapes of the params with which `apply` is called; None: those of `init`.

    Example:
      >>> from jaxroll.networks import make_policy
      >>> policy = make_policy(spaces.Box.create(-1, 1, (4,)), spaces.Discrete(2))
      >>> check_policy(policy, jnp.zeros((8, 4)), spaces.Discrete(3))
      Traceback (most recent call last):
        ...
      ValueError: the policy's distribution must have 3 choices for Discrete(n=3, ...), got 2 ...
    """
    batch = jax.tree.leaves(obs)[0].shape[0]
    is_first = jax.ShapeDtypeStruct((batch,), bool)
    key = jax.eval_shape(lambda: jax.random.key(0))
    if params is None:
        params = jax.eval_shape(policy.init, key, obs)
    carry = jax.eval_shape(lambda: policy.initial_carry(batch))
    result = jax.eval_shape(policy.apply, params, carry, obs, is_first)

    if not (isinstance(result, tuple) and len(result) == 2 and _is_output(result[1])):
        raise TypeError(
            "policy.apply must return (carry, PolicyOutput(distribution, value)), "
            f"got {_describe(result)}."
        )
    new_carry, output = result
    if _describe(new_carry) != _describe(carry):
        raise ValueError(
            "policy.apply must return a carry like the one it is given, "
            f"{_describe(carry)}, got {_describe(new_carry)}."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(output.value):
        if leaf.shape != (batch,):
            name = f"value{jax.tree_util.keystr(path)}"
            hint = " Drop the last axis: value[..., 0]." if leaf.shape == (batch, 1) else ""
            raise ValueError(
                f"the policy's {name} must have shape ({batch},), one number per row, "
                f"got {leaf.shape}.{hint}"
            )
    _check_distribution(output.distribution, key, batch, action_space)
    return output


def _is_output(output: Any) -> bool:
    return hasattr(output, "distribution") and hasattr(output, "value")


def _describe(tree: PyTree) -> str:
    shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    return str(shapes).replace("'", "")


def _check_distribution(distribution: Any, key: Any, batch: int, space: spaces.Space) -> None:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        choices = space.n if isinstance(space, spaces.Discrete) else max(space.nvec)
        logits = getattr(distribution, "logits", None)
        if logits is not None and logits.shape[-1] != choices:
            raise ValueError(
                f"the policy's distribution must have {choices} choices for {space}, "
                f"got {logits.shape[-1]} (logits {logits.shape})."
            )
    action: Any = jax.eval_shape(sample, distribution, key)
    if isinstance(space, spaces.Dict):
        expected = {name: (batch, *sub.shape) for name, sub in space.items}
        got = jax.tree.map(lambda x: x.shape, action)
    else:
        expected, got = (batch, *space.shape), getattr(action, "shape", action)
    if got != expected:
        raise ValueError(
            f"a sample of the policy's distribution must have shape {expected} for {space}, "
            f"got {got}."
        )
    if not isinstance(space, spaces.Dict):
        wants_float = jnp.issubdtype(space.dtype, jnp.floating)
        if jnp.issubdtype(action.dtype, jnp.floating) != wants_float:
            kind = "floats" if wants_float else "integers"
            raise ValueError(
                f"a sample of the policy's distribution must be {kind} for {space}, "
                f"got {action.dtype}."
            )
    for name in ("log_prob", "entropy"):
        arguments = (action,) if name == "log_prob" else ()
        result = jax.eval_shape(
            lambda d, *a, name=name: getattr(d, name)(*a), distribution, *arguments
        )
        if result.shape != (batch,):
            raise ValueError(
                f"{name} of the policy's distribution must have shape ({batch},), one number per "
                f"row, got {result.shape}."
            )
