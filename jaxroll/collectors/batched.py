"""What a rollout asks of its policy once for many steps: noise before them, values after.

Shared by the scan over JAX environments and the loop over host environments.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jaxroll.checks import divisors
from jaxroll.distributions import sample
from jaxroll.types import ActorState, Array, PyTree

# Values after the steps: so many rows at a time at most, of so many numbers.
_VALUE_ROWS, _VALUE_NUMBERS = 4096, 2**20


def action_draws(
    policy: Any,
    params: PyTree,
    actor: ActorState,
    key: jax.Array,
    num_steps: int,
    deterministic: bool,
) -> PyTree:
    """[T, ...] what `take_action` needs at each step.

    A distribution with `noise` and `sample_with` has its noise drawn for the whole rollout;
    `noise` reads shapes and dtypes only, so it can be asked before any output is there.
    """
    if deterministic:
        return None
    _, output = jax.eval_shape(policy.apply, params, actor.carry, actor.obs, actor.is_first)
    if _has_noise(output.distribution):
        return output.distribution.noise(key, (num_steps,))
    return jax.random.split(key, num_steps)


def take_action(distribution: Any, draw: PyTree, deterministic: bool) -> PyTree:
    """The action of one step, from its row of `action_draws`."""
    if deterministic:
        return distribution.mode()
    return (
        distribution.sample_with(draw) if _has_noise(distribution) else sample(distribution, draw)
    )


def _has_noise(distribution: Any) -> bool:
    return hasattr(distribution, "noise") and hasattr(distribution, "sample_with")


def steps_together(policy: Any, actor: ActorState, num_steps: int) -> int:
    """How many steps to value at once after all steps; 0: each within its own step.

    Within the step where the value shares its torso with the distribution or has a carry, and
    where one step has as many rows as a matrix product needs to be fast.
    """
    if jax.tree.leaves(actor.carry) or not getattr(policy, "has_separate_value", False):
        return 0
    num_envs = actor.is_first.shape[0]
    numbers = sum(x.size for x in jax.tree.leaves(actor.obs)) // num_envs
    rows = min(_VALUE_ROWS, _VALUE_NUMBERS // max(1, numbers))
    fitting = [n for n in divisors(num_steps) if n * num_envs <= rows]
    return fitting[-1] if len(fitting) > 1 else 0


def values_together(
    policy: Any, params: PyTree, obs: PyTree, is_first: Array, together: int
) -> PyTree:
    """[T, B] values of observations [T, B, ...], `together` steps at a time."""
    num_steps, num_envs = is_first.shape
    chunks = jax.tree.map(
        lambda x: x.reshape(-1, together * num_envs, *x.shape[2:]), (obs, is_first)
    )
    if together == num_steps:
        values = policy.value(params, (), *jax.tree.map(lambda x: x[0], chunks))
    else:
        values = lax.map(lambda rows: policy.value(params, (), *rows), chunks)
    return jax.tree.map(lambda v: v.reshape(num_steps, num_envs), values)
