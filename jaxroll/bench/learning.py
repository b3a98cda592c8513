"""Whether the faster program learns as well: both on the same number of steps, 16 seeds each."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import jaxroll
from jaxroll.bench import purejaxrl
from jaxroll.bench.harness import Ratio, Row, Settings, Spread, seconds


def learning(settings: Settings) -> list[Row]:
    """Return of the last tenth of training on CartPole, by quartiles over seeds."""
    num_seeds, num_updates = (2, 10) if settings.quick else (16, 970)
    config = dict(purejaxrl.CARTPOLE)
    keys = jax.random.split(jax.random.key(0), num_seeds)
    last = num_updates - num_updates // 10
    agent = jaxroll.PPO.create("CartPole-v1", **config)

    @jax.jit
    @jax.vmap
    def ours(key: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            state, metrics = agent.train_step(state)
            return state, metrics["episode_return"]

        _, returns = jax.lax.scan(step, agent.init(key), length=num_updates)
        tail = jax.tree.map(lambda x: x[last:].sum(0), returns)
        return tail.total / jax.numpy.maximum(tail.weight, 1)

    init, advance = purejaxrl.make_train("CartPole-v1", config)

    @jax.jit
    @jax.vmap
    def theirs(key: Any) -> Any:
        _, info = advance(init(key), num_updates)
        ended = info["returned_episode"][last:]
        total = (info["returned_episode_returns"][last:] * ended).sum()
        return total / jax.numpy.maximum(ended.sum(), 1)

    row = Row("learning", f"PPO, CartPole, 4 envs, {num_seeds} seeds", rounds=1)
    results = {}
    for name, run in (("jaxroll", ours), ("purejaxrl form", theirs)):
        row.first_calls[name] = seconds(
            lambda r=run, n=name: results.update({n: r(keys)}), settings
        )
        spread = Spread.of(np.asarray(results[name]).tolist())
        row.notes.append(
            f"{name}: return {spread.median:.1f} ({spread.low:.1f}–{spread.high:.1f}) in the last "
            f"tenth of {num_updates * 512:,} steps, quartiles over {num_seeds} seeds"
        )
    quotient = np.asarray(results["jaxroll"]) / np.asarray(results["purejaxrl form"])
    ratio = Ratio("jaxroll return", "purejaxrl return", at_least=0.97)
    row.ratios.append((ratio, Spread.of(quotient.tolist())))
    return [row]
