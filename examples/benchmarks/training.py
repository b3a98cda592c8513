"""Whole training steps: PPO against the purejaxrl form, and what else decides a run's speed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import purejaxrl
from harness import Ratio, Row, Run, Settings, measure
from jax import lax
from rejax_ppo import rejax_run

import jaxroll
from jaxroll import parallel

PUREJAXRL = "purejaxrl form"
LEAN = "purejaxrl form without info"
LOOP = "agent.train"


def one_jit(agent: Any, updates: int) -> Run:
    """Whole trainings from a key, `train_step` scanned in one jit."""

    @jax.jit
    def train(key: jax.Array) -> Any:
        step = lambda state, _: agent.train_step(state)  # noqa: E731
        return lax.scan(step, agent.init(key), length=updates)

    return lambda: train(jax.random.key(0))


def by_loop(agent: Any, updates: int) -> Run:
    """Whole trainings by `agent.train`, with its rows and its history."""
    steps = updates * agent.steps_per_iteration
    return lambda: agent.train(steps, seed=0, progress="silent")[0]


def purejaxrl_run(env: str, config: dict[str, Any], updates: int, **options: Any) -> Run:
    """Whole trainings of the purejaxrl form, one scan in one jit."""
    train = jax.jit(purejaxrl.make_train(env, config, updates, **options))
    return lambda: train(jax.random.key(0))


def agent_run(agent: Any, updates: int, *, mesh: Any = None, reduction: str = "fast") -> Run:
    """A run of `updates` iterations that goes on where the last one ended, on a mesh or not."""

    def advance(state: Any, axis_name: Any = None) -> Any:
        step = lambda state, _: agent.train_step(state, axis_name=axis_name, reduction=reduction)  # noqa: E731
        return lax.scan(step, state, length=updates)[0]

    state = jax.jit(agent.init)(jax.random.key(0))
    if mesh is not None:
        specs = agent.state_specs(parallel.ACTORS)
        state = parallel.place(state, mesh, specs)
        advance = parallel.on_mesh(advance, mesh, (specs,), specs)
    program = jax.jit(advance, donate_argnums=0)
    states = [state]

    def run() -> None:
        states[0] = jax.block_until_ready(program(states[0]))

    return run


def ppo(settings: Settings) -> list[Row]:
    """PPO on CartPole with purejaxrl's hyperparameters: whole trainings, compilation apart."""
    rows = []
    sizes = ((4, 100, 1.25), (64, 20, 1.5), (2048, 2, 1.5))
    for num_envs, updates, target in sizes[:1] if settings.quick else sizes:
        config = {**purejaxrl.CARTPOLE, "num_envs": num_envs}
        updates = 1 if settings.quick else updates
        agent = jaxroll.PPO.create("CartPole-v1", **config)
        contenders = {
            "jaxroll": one_jit(agent, updates),
            LOOP: by_loop(agent, updates),
            PUREJAXRL: purejaxrl_run("CartPole-v1", config, updates),
            LEAN: purejaxrl_run("CartPole-v1", config, updates, with_info=False),
        }
        with contextlib.suppress(ImportError):
            contenders["rejax"] = rejax_run("CartPole-v1", config, updates)
        ratios = [
            Ratio(PUREJAXRL, "jaxroll", at_least=target),
            Ratio(PUREJAXRL, LOOP),
            Ratio(LEAN, "jaxroll"),
            Ratio("rejax", "jaxroll"),
        ]
        steps = num_envs * config["num_steps"] * updates
        case = f"PPO, CartPole, {num_envs} envs"
        rows.append(measure("ppo", case, contenders, ratios, settings, steps=steps))
    return rows


def minatar(settings: Settings) -> list[Row]:
    """PPO on MinAtar's Breakout: the same MLP on flat observations, and the default network."""
    env, updates = "Breakout-MinAtar", 1
    config = {**purejaxrl.MINATAR}
    if settings.quick:
        config |= {"num_envs": 4, "num_steps": 16}
    mlp = {"network": "mlp", "hidden_sizes": (64, 64), "shared_torso": False, "activation": "tanh"}
    contenders = {
        "jaxroll": one_jit(jaxroll.PPO.create(env, **config, **mlp), updates),
        PUREJAXRL: purejaxrl_run(env, config, updates),
    }
    if not settings.quick:
        contenders["jaxroll, cnn"] = one_jit(jaxroll.PPO.create(env, **config), updates)
    steps = config["num_envs"] * config["num_steps"] * updates
    ratios = [Ratio(PUREJAXRL, "jaxroll"), Ratio("jaxroll, cnn", "jaxroll")]
    case = f"PPO, MinAtar Breakout, {config['num_envs']} envs"
    return [measure("minatar", case, contenders, ratios, settings, steps=steps)]


def impala(settings: Settings) -> list[Row]:
    """IMPALA's throughput, beside A2C's on as many environments and steps."""
    rows = []
    for env in ("CartPole-v1",) if settings.quick else ("CartPole-v1", "Breakout-MinAtar"):
        num_envs, updates = (8, 1) if settings.quick else (64, 4)
        sizes = {"num_envs": num_envs, "num_steps": 20}
        ring = {"num_storages": 2 * num_envs, "batch_size": num_envs // 2}
        contenders = {
            "IMPALA": agent_run(jaxroll.IMPALA.create(env, **sizes, **ring), updates),
            "A2C": agent_run(jaxroll.A2C.create(env, **sizes), updates),
        }
        steps = num_envs * 20 * updates
        case = f"IMPALA, {env}, {num_envs} envs"
        ratios = [Ratio("IMPALA", "A2C")]
        rows.append(measure("impala", case, contenders, ratios, settings, steps=steps))
    return rows


def collector(settings: Settings) -> list[Row]:
    """`collect` against a scan written by hand that keeps only what PPO needs."""
    env = jaxroll.make_env("CartPole-v1")
    policy = jaxroll.make_policy(env.observation_space, env.action_space)
    ours = jax.jit(jaxroll.collect, static_argnums=(0, 1, 4))
    rows = []
    for num_envs in (4,) if settings.quick else (4, 64, 2048):
        num_steps = 8 if settings.quick else 128
        actor = jaxroll.init_actor(env, policy, jax.random.key(0), num_envs)
        params = policy.init(jax.random.key(1), actor.obs)

        def by_hand(params: Any, state: Any, num_envs: Any = num_envs, length: int = num_steps):
            def step(state: Any, _: Any) -> Any:
                env_state, obs, key = state
                key, action_key, step_key = jax.random.split(key, 3)
                first = jnp.zeros(num_envs, bool)
                _, output = policy.apply(params, (), obs, first)
                action = output.distribution.sample(action_key)
                keys = jax.random.split(step_key, num_envs)
                env_state, step = jax.vmap(env.step)(keys, env_state, action)
                done = step.terminated | step.truncated
                log_prob = output.distribution.log_prob(action)
                row = (obs, action, step.reward, done, log_prob, output.value)
                return (env_state, step.obs, key), row

            state, stacked = lax.scan(step, state, length=length)
            last_value = policy.value(params, (), state[1], jnp.zeros(num_envs, bool))
            return state, (stacked, last_value)

        hand = jax.jit(by_hand)
        start = (actor.env, actor.obs, jax.random.key(2))
        contenders = {
            "jaxroll": lambda a=actor, p=params, n=num_steps: ours(env, policy, p, a, n),
            "by hand": lambda s=start, p=params, f=hand: f(p, s),
        }
        case = f"collect, CartPole, {num_envs} envs"
        steps = num_envs * num_steps
        ratios = [Ratio("jaxroll", "by hand", at_most=1.05)]
        rows.append(measure("collector", case, contenders, ratios, settings, steps=steps))
    return rows


def seeds(settings: Settings) -> list[Row]:
    """Many seeds at once against the same number one after the other."""
    rows = []
    agent = jaxroll.PPO.create("CartPole-v1", **purejaxrl.CARTPOLE)
    alone = agent_run(agent, 1)
    for count in (2,) if settings.quick else (1, 16, 128):

        @jax.jit
        def together(states: Any) -> Any:
            return jax.vmap(agent.train_step)(states)[0]

        states = [jax.jit(jax.vmap(agent.init))(jax.random.split(jax.random.key(0), count))]

        def run(states: Any = states, together: Any = together) -> Any:
            states[0] = together(states[0])
            return states[0]

        name = f"{count} seeds at once"
        row = measure(
            "seeds",
            f"PPO, CartPole, 4 envs, {count} seeds",
            {name: run, "one seed": alone},
            [Ratio("one seed", name)],
            settings,
            steps=agent.steps_per_iteration,
            per_call={name: count, "one seed": 1},
            notes=["times of a seed's update"],
        )
        rows.append(row)
    return rows


def exact(settings: Settings) -> list[Row]:
    """The reduction that does not depend on the devices, against the fast one."""
    rows = []
    for num_envs, num_actors, updates in (
        ((8, 2, 1),) if settings.quick else ((64, 4, 2), (2048, 4, 1))
    ):
        config = {**purejaxrl.CARTPOLE, "num_envs": num_envs, "num_actors": num_actors}
        agent = jaxroll.PPO.create("CartPole-v1", **config)
        contenders = {how: agent_run(agent, updates, reduction=how) for how in ("exact", "fast")}
        case = f"PPO, CartPole, {num_envs} envs, {num_actors} actors, one device"
        steps = agent.steps_per_iteration * updates
        ratios = [Ratio("exact", "fast", at_most=1.3)]
        rows.append(measure("exact", case, contenders, ratios, settings, steps=steps))
    return rows


def devices(settings: Settings) -> list[Row]:
    """One device and two; needs a process that was started with two."""
    num_envs = 64 if settings.quick else 2048
    config = {**purejaxrl.CARTPOLE, "num_envs": num_envs}
    one = jaxroll.PPO.create("CartPole-v1", **config)
    two = jaxroll.PPO.create("CartPole-v1", **config, num_actors=2)
    contenders = {
        "1 device": agent_run(one, 1),
        "1 device, 2 actors": agent_run(two, 1, mesh=parallel.make_mesh(1)),
        "2 devices": agent_run(two, 1, mesh=parallel.make_mesh(2)),
    }
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1:
        contenders["1 device on 1 core"] = _on_one_core(agent_run(one, 1))
    if not settings.quick:
        contenders["2 devices, exact"] = agent_run(
            two, 1, mesh=parallel.make_mesh(2), reduction="exact"
        )
    ratios = [
        Ratio("1 device", "2 devices", at_least=1.6),
        Ratio("1 device on 1 core", "2 devices", at_least=1.6),
        Ratio("1 device, 2 actors", "2 devices"),
        Ratio("2 devices, exact", "2 devices", at_most=1.3),
    ]
    steps = one.steps_per_iteration
    case = f"PPO, CartPole, {num_envs} envs"
    note = "on 1 core: all threads of the process are bound to it while this contender runs"
    return [measure("devices", case, contenders, ratios, settings, steps=steps, notes=[note])]


def _on_one_core(run: Run) -> Run:
    """The run with a single core, as a device of a real mesh has its own."""
    cores = os.sched_getaffinity(0)

    def bind(allowed: Iterable[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it may have ended meanwhile
                os.sched_setaffinity(int(thread), allowed)

    def bound() -> None:
        bind({min(cores)})
        try:
            jax.block_until_ready(run())
        finally:
            bind(cores)

    return bound
