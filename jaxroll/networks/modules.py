"""What was given as a policy, as a `Policy`: modules of network libraries."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax

from jaxroll.networks.base import Policy
from jaxroll.types import Array, PolicyOutput, PyTree

_NEEDED = ("apply", "initial_carry", "value")
_NNX = """
    graphdef = nnx.split(nnx.eval_shape(lambda: Model(rngs=nnx.Rngs(0))))[0]

    def init(key, obs):
        return nnx.split(Model(rngs=nnx.Rngs(key)))[1]

    def apply(params, carry, obs, is_first):
        return carry, jaxroll.PolicyOutput(*nnx.merge(graphdef, params)(obs))
"""
_EQUINOX = """
    static = eqx.partition(eqx.filter_eval_shape(Model, jax.random.key(0)), eqx.is_array_like)[1]

    def init(key, obs):
        return eqx.filter(Model(key), eqx.is_array)

    def apply(params, carry, obs, is_first):
        return carry, jaxroll.PolicyOutput(*jax.vmap(eqx.combine(params, static))(obs))
"""


def as_policy(policy: Any) -> Any:
    """The policy itself, or one around a flax.linen module.

    A linen module is called with observations [B, ...] and returns (distribution, value [B]) or a
    `PolicyOutput`; its params are all that `module.init(key, obs)` gives.

    Example:
      >>> import jax.numpy as jnp
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
    bases = [base.__module__ for base in type(policy).__mro__]
    if any(name.startswith("flax.linen") for name in bases):
        if hasattr(policy, "initial_carry"):
            return policy
        call = inspect.signature(policy.__call__).parameters.values()
        if len([p for p in call if p.default is p.empty and p.kind < p.VAR_POSITIONAL]) != 1:
            raise TypeError(
                f"a module as policy is called with observations only, but {type(policy).__name__} "
                f"takes {', '.join(p.name for p in call)}. Use jaxroll.Policy.from_functions(init, "
                "apply, initial_carry) for a recurrent one."
            )
        return ModulePolicy(policy)
    if all(hasattr(policy, name) for name in _NEEDED):
        return policy
    for library, code in (("flax.nnx", _NNX), ("equinox", _EQUINOX)):
        if any(name.startswith(library) for name in bases):
            raise TypeError(
                f"{type(policy).__name__} of {library} holds its arrays, a policy is a function "
                f"of params. Give jaxroll.Policy.from_functions(init, apply), for instance\n{code}"
            )
    raise TypeError(
        f"policy must be a jaxroll.Policy (with init, {', '.join(_NEEDED)}) or a flax.linen "
        f"module, got {type(policy).__name__}. Use jaxroll.Policy.from_functions(init, apply)."
    )


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
            kinds = out if isinstance(out, tuple) else (out,)
            got = ", ".join(type(x).__name__ for x in kinds)
            raise TypeError(
                f"{type(self.module).__name__} as policy must return (distribution, value), got "
                f"({got}). Make logits a distribution: jaxroll.distributions.Categorical(logits)."
            )
        return carry, PolicyOutput(*out)
