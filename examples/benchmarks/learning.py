"""Whether the faster program learns as well: both on the same number of steps, 16 seeds each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import purejaxrl
from harness import Ratio, Row, Settings, Spread, seconds

import jaxroll


def learning(settings: Settings) -> list[Row]:
    """Return in each tenth of training on CartPole, by quartiles over seeds."""
    num_seeds, num_updates = (2, 10) if settings.quick else (16, 970)
    config = dict(purejaxrl.CARTPOLE)
    keys = jax.random.split(jax.random.key(0), num_seeds)
    agent = jaxroll.PPO.create("CartPole-v1", **config)

    def tenths(totals: Any, counts: Any) -> Any:
        """[updates] sums and counts of ended episodes → [10] mean returns."""
        totals, counts = (x.reshape(10, -1).sum(1) for x in (totals, counts))
        return totals / jnp.maximum(counts, 1)

    @jax.jit
    @jax.vmap
    def ours(key: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            state, metrics = agent.train_step(state)
            return state, metrics["episode_return"]

        _, returns = jax.lax.scan(step, agent.init(key), length=num_updates)
        return tenths(returns.total, returns.weight)

    train = purejaxrl.make_train("CartPole-v1", config, num_updates)

    @jax.jit
    @jax.vmap
    def theirs(key: Any) -> Any:
        _, info = train(key)
        ended = info["returned_episode"]
        totals = jnp.sum(info["returned_episode_returns"] * ended, axis=(1, 2))
        return tenths(totals, ended.sum((1, 2)))

    row = Row("learning", f"PPO, CartPole, 4 envs, {num_seeds} seeds", rounds=1)
    row.notes.append(f"mean return in each tenth of {num_updates * 512:,} steps, medians of seeds")
    results = {}
    for name, run in (("jaxroll", ours), ("purejaxrl form", theirs)):
        row.first_calls[name] = seconds(
            lambda r=run, n=name: results.update({n: np.asarray(r(keys))}), settings
        )
        curve = " ".join(f"{x:.0f}" for x in np.median(results[name], 0))
        last = Spread.of(results[name][:, -1].tolist())
        row.notes.append(f"{name}: {curve}; last tenth {last.low:.1f}–{last.high:.1f} (quartiles)")
    # The seeds of the two are not pairs, so medians are compared, over the seeds' order.
    for label, pick in (("last tenth", lambda x: x[:, -1]), ("whole run", lambda x: x.mean(1))):
        both = [np.sort(pick(results[name])) for name in ("jaxroll", "purejaxrl form")]
        ratio = Ratio(f"jaxroll return, {label}", "purejaxrl return", at_least=0.97)
        row.ratios.append((ratio, Spread.of((both[0] / both[1]).tolist())))
    return [row]
