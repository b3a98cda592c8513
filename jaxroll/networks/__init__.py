"""Default networks behind the `Policy` protocol; any other network library fits it too."""

from jaxroll.networks.actor_critic import DTYPES, ActorCritic, ActorCriticPolicy, make_policy
from jaxroll.networks.decoupled import DecoupledPolicy, make_decoupled_policy
from jaxroll.networks.layers import MLP, Body, ConvTorso, Core, Dense, Encoder
from jaxroll.networks.policy import (
    FunctionPolicy,
    ModulePolicy,
    Policy,
    as_policy,
    check_policy,
)

__all__ = [
    "DTYPES",
    "MLP",
    "ActorCritic",
    "ActorCriticPolicy",
    "Body",
    "ConvTorso",
    "Core",
    "DecoupledPolicy",
    "Dense",
    "Encoder",
    "FunctionPolicy",
    "ModulePolicy",
    "Policy",
    "as_policy",
    "check_policy",
    "make_decoupled_policy",
    "make_policy",
]
