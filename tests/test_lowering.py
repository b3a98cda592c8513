"""Every program lowers for GPUs and TPUs, and holds what makes them slow there to a minimum.

Nothing runs: a program is lowered for a platform, and its loops, branches and sorts are read.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from lowered import PLATFORMS, lower

import jaxroll
from jaxroll.storages import minibatches

T, B = 16, 8
SMALL: dict[str, dict[str, Any]] = {
    "PPO": {"num_envs": 64, "num_steps": T, "num_epochs": 2, "num_mini_batch": 4},
    "A2C": {"num_envs": 64, "num_steps": T},
    "DAAC": {"num_envs": 64, "num_steps": T, "num_epochs": 1, "num_mini_batch": 4},
    "IMPALA": {"num_envs": 32, "num_steps": T, "num_storages": 64, "batch_size": 32},
}
KEY = jax.eval_shape(lambda: jax.random.key(0))
platforms = pytest.mark.parametrize("platform", PLATFORMS)


@functools.cache
def agent_and_state(name: str, **options: Any) -> tuple[Any, Any]:
    agent = getattr(jaxroll, name).create("CartPole-v1", **{**SMALL[name], **options})
    return agent, jax.eval_shape(agent.init, jax.random.key(0))


def check_program(program: Any) -> None:
    """What no program may have: the host would wait, or the platform is slow at it."""
    assert program.branches_on_data() == []
    assert program.wide_sorts() == []
    assert program.host_calls() == []


@platforms
@pytest.mark.parametrize("name", SMALL)
def test_train_step_loops_over_rollout_and_minibatches_only(name: str, platform: str) -> None:
    agent, state = agent_and_state(name)
    program = lower(agent.train_step, state, platform=platform)
    check_program(program)
    minibatches = {
        "PPO": [(2 * 4,)],
        "A2C": [],
        "DAAC": [(4,), (9 * 4,)],
        "IMPALA": [],
    }[name]
    assert [loop for loop in program.loops() if loop != (1,)] == sorted([(T,), *minibatches])


@platforms
def test_operations_of_a_ppo_step_are_within_budget(platform: str) -> None:
    agent, state = agent_and_state("PPO")
    sizes = lower(agent.train_step, state, platform=platform).body_sizes()
    assert sizes[(T,)] < 320  # a step of CartPole, the policy and its draw
    assert sizes[(8,)] < 1100  # loss, gradient and Adam
    assert sizes[()] < 3200  # keys, targets, shuffle, metrics


@platforms
@pytest.mark.parametrize("name", SMALL)
def test_init_lowers(name: str, platform: str) -> None:
    agent, _ = agent_and_state(name)
    check_program(lower(agent.init, KEY, platform=platform))


@platforms
@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("num_devices", [pytest.param(8, marks=pytest.mark.slow), 256])
@pytest.mark.parametrize("name", SMALL)
def test_train_step_lowers_on_a_mesh(
    name: str, num_devices: int, reduction: str, platform: str
) -> None:
    """8 devices with small batches, and 256 with a million environments."""
    pod = {
        "num_actors": 256,
        "num_envs": 2**20,
        **({"num_storages": 2**20, "batch_size": 2**20} if name == "IMPALA" else {}),
    }
    options = pod if num_devices == 256 else {"num_actors": 8}
    agent, state = agent_and_state(name, **options)
    mesh = AbstractMesh((num_devices,), ("actors",), axis_types=(AxisType.Auto,))
    specs = agent.state_specs("actors")
    step = jax.shard_map(
        lambda s: agent.train_step(s, axis_name="actors", reduction=reduction),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(specs, PartitionSpec()),
        check_vma=False,
    )
    check_program(lower(step, state, platform=platform))


@platforms
def test_collect_is_one_loop(platform: str) -> None:
    agent, state = agent_and_state("PPO")
    actor = jax.eval_shape(lambda s: jax.tree.map(lambda x: x[0], s.actors), state)

    def run(params: Any, actor: Any) -> Any:
        return jaxroll.collect(agent.env, agent.policy, params, actor, T)

    program = lower(run, state.learner.params, actor, platform=platform)
    check_program(program)
    assert program.loops() == [(T,)]


@platforms
def test_evaluate_asks_the_host_once_in_many_steps(platform: str) -> None:
    agent, state = agent_and_state("PPO")

    def run(params: Any, key: Any) -> Any:
        return jaxroll.evaluate(
            agent.env, agent.policy, params, key, num_episodes=8, num_envs=8, max_steps=500
        )

    program = lower(run, state.learner.params, KEY, platform=platform)
    steps = [loop for loop in program.loops() if loop[0] == -1]
    assert (-1,) in steps  # until all episodes are done
    assert any(len(loop) == 2 and loop[1] >= 8 for loop in steps)  # steps within each turn


ROWS = jax.ShapeDtypeStruct((T, B), jnp.float32)
FLAGS = jax.ShapeDtypeStruct((T, B), jnp.bool_)
LAST = jax.ShapeDtypeStruct((B,), jnp.float32)


def gae(r: Any, v: Any, end: Any, cut: Any, last: Any) -> Any:
    return jaxroll.gae(r, v, last, end, cut, v, 0.99, 0.95)


def lambda_returns(r: Any, v: Any, end: Any, cut: Any, last: Any) -> Any:
    return jaxroll.lambda_returns(r, v, last, end, cut, v, 0.99, 0.95)


def discounted_returns(r: Any, v: Any, end: Any, cut: Any, last: Any) -> Any:
    return jaxroll.discounted_returns(r, last, end, cut, v, 0.99)


def vtrace(r: Any, v: Any, end: Any, cut: Any, last: Any) -> Any:
    return jaxroll.vtrace(v, r, v, last, end, cut, v, 0.99)


def retrace(r: Any, v: Any, end: Any, cut: Any, last: Any) -> Any:
    return jaxroll.retrace(v, r, v, v, last, end, cut, v, 0.99)


@platforms
@pytest.mark.parametrize("estimator", [gae, lambda_returns, discounted_returns, vtrace, retrace])
def test_estimators_have_no_loop(estimator: Any, platform: str) -> None:
    for function in (
        estimator,
        jax.grad(lambda *a: sum(jnp.sum(x) for x in jax.tree.leaves(estimator(*a)))),
    ):
        program = lower(function, ROWS, ROWS, FLAGS, FLAGS, LAST, platform=platform)
        check_program(program)
        assert program.loops() == []


@platforms
@pytest.mark.parametrize("num_envs", [B, B - 1])
def test_plan_sorts_no_wide_words(num_envs: int, platform: str) -> None:
    make = functools.partial(
        minibatches.plan, num_steps=T, num_envs=num_envs, num_mini_batch=4, num_epochs=2
    )
    check_program(lower(make, KEY, platform=platform))
