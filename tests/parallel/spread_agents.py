"""Agents of eight logical actors, one of each kind: normalised, convolutional, recurrent."""

from jaxroll import DAAC, IMPALA, PPO
from tests.agents.agent_toys import DRIFT, small

SIZES = {"num_actors": 8, "num_envs": 16, "num_steps": 8, "hidden_sizes": (16,)}

AGENTS = {
    "ppo": lambda: PPO.create(
        "CartPole-v1",
        normalize_observations=True,
        normalize_rewards=True,
        num_mini_batch=2,
        **SIZES,
    ),
    "convolutional ppo": lambda: PPO.create("Breakout-MinAtar", num_mini_batch=2, **SIZES),
    "continuous ppo": lambda: PPO.create("Pendulum-v1", num_mini_batch=2, **SIZES),
    "recurrent ppo": lambda: PPO.create(
        "CartPole-v1", network="lstm", num_mini_batch=2, sequence_length=4, **SIZES
    ),
    "daac": lambda: DAAC.create(
        "CartPole-v1", num_mini_batch=2, value_epochs=2, value_freq=2, **SIZES
    ),
    "impala": lambda: IMPALA.create(
        "CartPole-v1", network="gru", num_storages=32, batch_size=8, **SIZES
    ),
}

TINY = "spread tiny"  # for many updates, not for what they learn


def make(name):
    """An agent of AGENTS, or the tiny one."""
    if name == TINY:
        return small("ppo", DRIFT, num_actors=8, num_envs=8, num_steps=2, num_epochs=1)
    return AGENTS[name]()
