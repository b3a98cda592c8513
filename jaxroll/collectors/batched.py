"""What a rollout asks of its policy once for many steps: noise before them, values after.

Shared by the scan over JAX environments and the loop over host environments.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax

from jaxroll.checks import divisors
from jaxroll.distributions import sample
from jaxroll.types import ActorState, Array, PyTree
from jaxroll.varying import vary_as

# Values after the steps: so many rows at a time at most, of so many numbers. A CPU keeps them
# in its cache, an accelerator starts few kernels.
_CPU_ROWS, _ACCELERATOR_ROWS = (4096, 2**20), (2**20, 2**28)


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


def values_after(policy: Any, actor: ActorState) -> bool:
    """Whether values are left to after the steps: a feed-forward critic that is its own network."""
    return not jax.tree.leaves(actor.carry) and getattr(policy, "has_separate_value", False)


def values_together(policy: Any, params: PyTree, obs: PyTree, is_first: Array) -> PyTree:
    """[T, B] values of observations [T, B, ...], many steps at a time."""
    num_steps, num_envs = is_first.shape
    numbers = max(1, sum(x.size for x in jax.tree.leaves(obs)) // is_first.size)

    def steps_of(limits: tuple[int, int]) -> int:
        rows = min(limits[0], limits[1] // numbers)
        return max(n for n in divisors(num_steps) if n == 1 or n * num_envs <= rows)

    def value(together: int, params: PyTree, obs: PyTree, is_first: Array) -> PyTree:
        chunks = jax.tree.map(
            lambda x: x.reshape(-1, together * num_envs, *x.shape[2:]), (obs, is_first)
        )
        if together == num_steps:
            values = policy.value(params, (), *jax.tree.map(lambda x: x[0], chunks))
        else:
            values = lax.map(lambda rows: policy.value(params, (), *rows), chunks)
        values = jax.tree.map(lambda v: v.reshape(num_steps, num_envs), values)
        return vary_as(values, like=(params, obs, is_first))

    on_cpu, elsewhere = (
        functools.partial(value, steps_of(limits)) for limits in (_CPU_ROWS, _ACCELERATOR_ROWS)
    )
    if on_cpu.args == elsewhere.args:
        return on_cpu(params, obs, is_first)
    return lax.platform_dependent(params, obs, is_first, cpu=on_cpu, default=elsewhere)
