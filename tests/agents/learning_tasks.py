"""What agents must be able to learn: the tasks of the slow tier (3 seeds) and the long one (10).

Seeds are members of one vmapped program; each has the keys of its solo run.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import collectors, make_env
from jaxroll.agents import AGENTS

NUM_EPISODES = 100


@dataclasses.dataclass(frozen=True)
class Task:
    """An agent, an environment, and the mean evaluation return that most seeds must reach."""

    agent: str
    env: str
    steps: int
    threshold: float
    env_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def make(self):
        """The agent."""
        return AGENTS[self.agent].create(make_env(self.env, **self.env_options), **self.options)


MEMORY = {"memory_length": 10}
# An episode of MemoryChain has 11 steps: unrolls of 22 hold two.
MEMORY_PPO = {"num_envs": 64, "num_steps": 22, "num_mini_batch": 4, "learning_rate": 1e-3}
MEMORY_IMPALA = {"num_steps": 22, "learning_rate": 2e-3, "rmsprop_epsilon": 1e-3}
PENDULUM = {
    "num_envs": 16,
    "num_steps": 128,
    "num_epochs": 10,
    "num_mini_batch": 16,
    "discount": 0.9,
    "learning_rate": 1e-3,
    "entropy_coef": 0.0,
    "normalize_rewards": True,
    "decay_steps": 500_000,
}
TASKS = {
    "ppo CartPole": Task("ppo", "CartPole-v1", 300_000, 475, options={"decay_steps": 300_000}),
    "a2c CartPole": Task("a2c", "CartPole-v1", 500_000, 475),
    "daac CartPole": Task("daac", "CartPole-v1", 500_000, 475),
    "impala CartPole": Task("impala", "CartPole-v1", 500_000, 475),
    "ppo Pendulum": Task("ppo", "Pendulum-v1", 500_000, -250, options=PENDULUM),
    "lstm ppo MemoryChain": Task(
        "ppo", "MemoryChain-bsuite", 300_000, 0.95, MEMORY, {**MEMORY_PPO, "network": "lstm"}
    ),
    "lstm impala MemoryChain": Task(
        "impala", "MemoryChain-bsuite", 500_000, 0.95, MEMORY, {**MEMORY_IMPALA, "network": "lstm"}
    ),
}
CHANCE = Task("ppo", "MemoryChain-bsuite", 300_000, 0.4, MEMORY, MEMORY_PPO)


def learn(task: Task, seeds: int) -> np.ndarray:
    """[seeds] mean return over whole episodes of the deterministic policy, after training."""
    agent = task.make()
    iterations = -(-(task.steps - agent.prefilled_steps) // agent.steps_per_iteration)

    def play(params: Any) -> Any:
        return collectors.evaluate(
            agent.env, agent.policy, params, jax.random.key(2**20), num_episodes=NUM_EPISODES
        ).episode_return.mean()

    def solo(seed: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            return agent.train_step(state)[0], None

        state, _ = jax.lax.scan(step, agent.init(jax.random.key(seed)), length=iterations)
        return agent.acting_params(state.learner)

    params = jax.jit(jax.vmap(solo))(jnp.arange(seeds))
    return np.asarray(jax.jit(jax.vmap(play))(params))
