"""Environments on the host: the collector against a bare loop, PPO against Stable-Baselines3."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import purejaxrl
from harness import Ratio, Row, Settings, Spread, measure
from training import agent_run, one_jit

import jaxroll
from jaxroll import collectors


def host(settings: Settings) -> list[Row]:
    """Gymnasium's CartPole, vectorised, under `HostCollector` and under a loop written by hand."""
    try:
        import gymnasium
    except ImportError:
        return [Row("host", "CartPole", notes=["gymnasium is not installed: skipped"])]
    num_envs, num_steps = (4, 8) if settings.quick else (64, 128)
    vectorised: dict[str, Any] = {"vectorization_mode": "vector_entry_point"}
    spec = jaxroll.make_env("gymnasium:CartPole-v1", **vectorised)
    envs = spec.make(num_envs)
    bare = gymnasium.make_vec("CartPole-v1", num_envs, **vectorised)
    try:
        policy = jaxroll.make_policy(envs.observation_space, envs.action_space)
        collector = collectors.HostCollector(envs, policy)
        actors = [collector.init(jax.random.key(0))]
        params = policy.init(jax.random.key(1), actors[0].obs)

        def ours() -> Any:
            actors[0], rollout = collector.collect(params, actors[0], num_steps)
            return rollout

        contenders = {"jaxroll": ours, "bare loop": _bare_loop(bare, policy, params, num_steps)}
        case = f"collect, gymnasium CartPole, {num_envs} envs"
        ratios = [Ratio("jaxroll", "bare loop", at_most=1.1)]
        steps = num_envs * num_steps
        return [measure("host", case, contenders, ratios, settings, steps=steps)]
    finally:
        envs.close()
        bare.close()


def _bare_loop(envs: Any, policy: Any, params: Any, num_steps: int) -> Any:
    """A jitted policy, numpy rows, nothing else: no truncation, no statistics."""
    num_envs = envs.num_envs
    obs = [envs.reset(seed=0)[0]]
    first = np.zeros(num_envs, bool)

    @jax.jit
    def act(params: Any, obs: Any, key: Any, t: Any) -> Any:
        _, output = policy.apply(params, (), obs, first)
        action = output.distribution.sample(jax.random.fold_in(key, t))
        return action, output.distribution.log_prob(action), output.value

    def run() -> Any:
        key = jax.random.key(0)
        rows = {
            "obs": np.empty((num_steps, num_envs, 4), np.float32),
            "action": np.empty((num_steps, num_envs), np.int32),
            **{
                name: np.empty((num_steps, num_envs), np.float32)
                for name in ("log_prob", "value", "reward", "done")
            },
        }
        for t in range(num_steps):
            rows["obs"][t] = obs[0]
            action, log_prob, value = act(params, obs[0], key, t)
            rows["action"][t], rows["log_prob"][t], rows["value"][t] = action, log_prob, value
            obs[0], rows["reward"][t], terminated, truncated, _ = envs.step(rows["action"][t])
            rows["done"][t] = terminated | truncated
        return jax.tree.map(jnp.asarray, rows)

    return run


def stable_baselines(settings: Settings) -> list[Row]:
    """PPO on CartPole against Stable-Baselines3 with the same hyperparameters."""
    case = "PPO, CartPole, 8 envs"
    try:
        import gymnasium
        import stable_baselines3
    except ImportError:
        note = "stable-baselines3 (with torch) or gymnasium is not installed: skipped"
        return [Row("sb3", case, notes=[note])]
    num_envs, num_steps = 8, 32 if settings.quick else 128
    config = {**purejaxrl.CARTPOLE, "num_envs": num_envs, "num_steps": num_steps}
    updates = 1 if settings.quick else 20
    ours = agent_run(jaxroll.PPO.create("CartPole-v1", **config), updates)
    venv = stable_baselines3.common.env_util.make_vec_env(  # pyright: ignore
        lambda: gymnasium.make("CartPole-v1"), num_envs, seed=0
    )
    theirs = stable_baselines3.PPO(
        "MlpPolicy",
        venv,
        learning_rate=config["learning_rate"],
        n_steps=num_steps,
        batch_size=num_envs * num_steps // config["num_mini_batch"],
        n_epochs=config["num_epochs"],
        ent_coef=config["entropy_coef"],
        device="cpu",
        seed=0,
    )

    def learn() -> None:
        theirs.learn(num_envs * num_steps)

    try:
        row = measure(
            "sb3",
            case,
            {"jaxroll": ours, "stable-baselines3": learn},
            [Ratio("stable-baselines3", "jaxroll", at_least=25)],
            settings,
            steps=num_envs * num_steps,
            per_call={"jaxroll": updates, "stable-baselines3": 1},
        )
    finally:
        venv.close()
    return [row]


def startup(settings: Settings) -> list[Row]:
    """From a new process to the first update done; run in a process of its own.

    The numbers are of one start: of the import, of making the agent, of the first iteration, which
    compiles, and of a second.
    """
    clock = time.perf_counter
    times = {}

    def lap(name: str, start: float) -> float:
        now = clock()
        times[name] = Spread.of([now - start])
        return now

    config = {**purejaxrl.CARTPOLE}
    now = clock()
    agent = jaxroll.PPO.create("CartPole-v1", **config)
    now = lap("create the agent", now)
    run = agent_run(agent, 1)
    now = lap("init", now)
    run()
    now = lap("first iteration, compiled", now)
    run()
    now = lap("second iteration", now)
    jax.block_until_ready(one_jit(agent, 1)())
    now = lap("one jit: first training of one update, compiled", now)
    jax.block_until_ready(
        jax.jit(purejaxrl.make_train("CartPole-v1", config, 1))(jax.random.key(0))
    )
    lap("purejaxrl form: the same", now)
    return [Row("startup", "PPO, CartPole, 4 envs", times=times, rounds=1)]
