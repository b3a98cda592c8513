"""What a policy is, to everything else in the library, and what else can serve as one.

A policy is a value: frozen, hashable, compared by content, with no arrays in it. Parameters and
the recurrent state (the carry) are pytrees that it is given. Any network library fits: subclass
`Policy`, or hand two functions to `Policy.from_functions`.
"""

from __future__ import annotations

import dataclasses
import inspect
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
            step = lambda carry, inputs: self.apply(params, carry, *inputs)  # noqa: E731
            return jax.lax.scan(step, carry, (obs, is_first))
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (obs, is_first))
        _, output = self.apply(params, carry, *rows)
        return carry, jax.tree.map(lambda x: x.reshape(*is_first.shape, *x.shape[1:]), output)

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


@dataclasses.dataclass(frozen=True)
class ModulePolicy(Policy):
    """A feed-forward flax.linen module as a policy; made by `as_policy`."""

    module: Any

    def init(self, key: jax.Array, obs: PyTree) -> PyTree:
        """What `module.init(key, obs)` gives: {"params": …}."""
        params = self.module.init(key, obs)
        if set(params) - {"params"}:
            raise ValueError(
                f"a module as policy has params only, but {type(self.module).__name__} has "
                f"{sorted(params)}: what it remembers would be trained. Use "
                "jaxroll.Policy.from_functions(init, apply)."
            )
        return params

    def apply(
        self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """(carry, output); leaves [B, ...]."""
        out = self.module.apply(params, obs)
        if isinstance(out, PolicyOutput):
            return carry, out
        if not (isinstance(out, tuple) and len(out) == 2 and hasattr(out[0], "log_prob")):
            got = ", ".join(type(x).__name__ for x in (out if isinstance(out, tuple) else (out,)))
            raise TypeError(
                f"{type(self.module).__name__} as policy must return (distribution, value), got "
                f"({got}). Make logits a distribution: jaxroll.distributions.Categorical(logits)."
            )
        return carry, PolicyOutput(*out)


_NEEDED = ("apply", "initial_carry", "value")
# Code for libraries whose modules hold their arrays.
_HINTS = {
    "flax.nnx": """
    graphdef = nnx.split(nnx.eval_shape(lambda: Model(rngs=nnx.Rngs(0))))[0]

    def init(key, obs):
        return nnx.split(Model(rngs=nnx.Rngs(key)))[1]

    def apply(params, carry, obs, is_first):
        return carry, jaxroll.PolicyOutput(*nnx.merge(graphdef, params)(obs))
""",
    "equinox": """
    static = eqx.partition(eqx.filter_eval_shape(Model, jax.random.key(0)), eqx.is_array_like)[1]

    def init(key, obs):
        return eqx.filter(Model(key), eqx.is_array)

    def apply(params, carry, obs, is_first):
        return carry, jaxroll.PolicyOutput(*jax.vmap(eqx.combine(params, static))(obs))
""",
}


def as_policy(policy: Any) -> Any:
    """The policy itself, or one around a flax.linen module.

    A linen module is called with observations [B, ...] and returns (distribution, value [B]) or a
    `PolicyOutput`; its params are all that `module.init(key, obs)` gives.

    Example:
      >>> from flax import linen as nn
      >>> from jaxroll.distributions import Categorical
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, obs):
      ...         return Categorical(nn.Dense(2)(obs)), nn.Dense(1)(obs)[:, 0]
      >>> policy, obs = as_policy(Model()), jnp.zeros((8, 4))
      >>> params = policy.init(jax.random.key(0), obs)
      >>> policy.apply(params, (), obs, jnp.zeros(8, bool))[1].value.shape
      (8,)
    """
    if isinstance(policy, type):
        raise TypeError(f"policy must be an instance, got the class {policy.__name__}.")
    name, bases = type(policy).__name__, [base.__module__ for base in type(policy).__mro__]
    is_linen = any(base.startswith("flax.linen") for base in bases)
    # Every linen module has `apply`, so one that is a policy is known by its `initial_carry`.
    if hasattr(policy, "initial_carry") and (is_linen or all(hasattr(policy, x) for x in _NEEDED)):
        return policy
    if is_linen:
        call = inspect.signature(policy.__call__).parameters.values()
        if len([p for p in call if p.default is p.empty and p.kind < p.VAR_POSITIONAL]) != 1:
            raise TypeError(
                f"a module as policy is called with observations only, but {name} "
                f"takes {', '.join(p.name for p in call)}. Use jaxroll.Policy.from_functions(init, "
                "apply, initial_carry) for a recurrent one."
            )
        return ModulePolicy(policy)
    for library, code in _HINTS.items():
        if any(base.startswith(library) for base in bases):
            raise TypeError(
                f"{name} of {library} holds its arrays, a policy is a function of params. Give "
                f"jaxroll.Policy.from_functions(init, apply), for instance\n{code}"
            )
    raise TypeError(
        f"policy must be a jaxroll.Policy (with init, {', '.join(_NEEDED)}) or a flax.linen "
        f"module, got {name}. Use jaxroll.Policy.from_functions(init, apply)."
    )


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
    key = jax.eval_shape(lambda: jax.random.key(0))
    if params is None:
        params = jax.eval_shape(policy.init, key, obs)
    carry = jax.eval_shape(lambda: policy.initial_carry(batch))
    is_first = jax.ShapeDtypeStruct((batch,), bool)
    result = jax.eval_shape(policy.apply, params, carry, obs, is_first)
    if not (isinstance(result, tuple) and len(result) == 2 and hasattr(result[1], "distribution")):
        raise TypeError(
            "policy.apply must return (carry, PolicyOutput(distribution, value)), "
            f"got {_describe(result)}."
        )
    after, output = result
    if _describe(after) != _describe(carry):
        raise ValueError(
            "policy.apply must return a carry like the one it is given, "
            f"{_describe(carry)}, got {_describe(after)}."
        )
    action = _check_sample(output.distribution, key, batch, action_space)
    numbers = jax.eval_shape(
        lambda d, a: {"log_prob": d.log_prob(a), "entropy": d.entropy()},
        output.distribution,
        action,
    )
    numbers = {"value": output.value, **numbers}
    for path, leaf in jax.tree_util.tree_leaves_with_path(numbers):
        if leaf.shape != (batch,):
            hint = " Drop the last axis: [..., 0]." if leaf.shape == (batch, 1) else ""
            raise ValueError(
                f"the policy's {path[0].key}{jax.tree_util.keystr(path[1:])} must have shape "
                f"({batch},), one number per row, got {leaf.shape}.{hint}"
            )
    return output


def _check_sample(distribution: Any, key: Any, batch: int, space: spaces.Space) -> PyTree:
    """The shapes of a sample; raise unless they are the space's."""
    logits = getattr(distribution, "logits", None)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and logits is not None:
        choices = space.n if isinstance(space, spaces.Discrete) else max(space.nvec)
        if logits.shape[-1] != choices:
            raise ValueError(
                f"the policy's distribution must have {choices} choices for {space}, "
                f"got {logits.shape[-1]} (logits {logits.shape})."
            )

    def kinds(tree: PyTree) -> PyTree:
        floats = {True: "floats", False: "integers"}
        describe = lambda x: f"{floats[jnp.issubdtype(x.dtype, jnp.floating)]} {x.shape}"  # noqa: E731
        return jax.tree.map(describe, tree)

    action: Any = jax.eval_shape(sample, distribution, key)
    expected, got = kinds(spaces.zeros(space, (batch,))), kinds(action)
    if got != expected:
        raise ValueError(
            f"a sample of the policy's distribution must be {expected} for {space}, got {got}."
        )
    return action


def _describe(tree: PyTree) -> str:
    shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    return str(shapes).replace("'", "")
