"""Agents: which parts an algorithm uses and how they are wired."""

from jaxroll.agents.a2c import A2C
from jaxroll.agents.base import DistributedAgent
from jaxroll.agents.daac import DAAC
from jaxroll.agents.hyperparameters import leaf, static
from jaxroll.agents.impala import IMPALA
from jaxroll.agents.on_policy import OnPolicyAgent
from jaxroll.agents.ppo import PPO
from jaxroll.agents.states import LearnerState, TrainState

AGENTS = {agent.name: agent for agent in (PPO, A2C, DAAC, IMPALA)}

__all__ = [
    "A2C",
    "AGENTS",
    "DAAC",
    "IMPALA",
    "PPO",
    "DistributedAgent",
    "LearnerState",
    "OnPolicyAgent",
    "TrainState",
    "leaf",
    "static",
]
