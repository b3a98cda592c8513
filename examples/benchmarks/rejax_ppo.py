"""rejax's PPO as a contender.

It expects the five values that gymnax's `step` gave before version 1.0; an environment in between
gives it these. It has no schedule for the learning rate, and trains actor and critic by an
optimiser each; all else is set as for the other contenders.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from harness import Run


class FiveValues:
    """A gymnax environment whose `step` gives (obs, state, reward, done, info)."""

    def __init__(self, env: Any):
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def __deepcopy__(self, _: Any) -> FiveValues:
        return self

    def step(self, key: jax.Array, state: Any, action: Any, params: Any) -> tuple[Any, ...]:
        """One step; a truncation counts as an end, as it did then."""
        obs, state, reward, terminated, truncated, info = self.env.step(key, state, action, params)
        return obs, state, reward, jnp.asarray(terminated | truncated), info


def rejax_run(env_name: str, config: dict[str, Any], updates: int) -> Run:
    """Whole trainings by rejax's PPO in one jit; raises ImportError where it is not installed."""
    import gymnax
    import rejax

    env, params = gymnax.make(env_name)
    agent: Any = rejax.PPO.create(
        env=FiveValues(env),
        env_params=params,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        num_envs=config["num_envs"],
        num_steps=config["num_steps"],
        num_epochs=config["num_epochs"],
        num_minibatches=config["num_mini_batch"],
        learning_rate=config["learning_rate"],
        max_grad_norm=config["max_grad_norm"],
        gamma=config["discount"],
        gae_lambda=config["gae_lambda"],
        clip_eps=config["clip_epsilon"],
        ent_coef=config["entropy_coef"],
        vf_coef=config["value_coef"],
    )

    @jax.jit
    def train(key: jax.Array) -> Any:
        step = lambda _, state: agent.train_iteration(state)  # noqa: E731
        return jax.lax.fori_loop(0, updates, step, agent.init_state(key))

    return lambda: train(jax.random.key(0))
