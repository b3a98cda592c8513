"""Default networks behind the `Policy` protocol; any other network library fits it too."""

from jaxroll.networks.actor_critic import DTYPES, ActorCritic, ActorCriticPolicy, make_policy
from jaxroll.networks.base import FunctionPolicy, Policy, check_policy
from jaxroll.networks.decoupled import DecoupledPolicy, make_decoupled_policy
from jaxroll.networks.modules import ModulePolicy, as_policy
from jaxroll.networks.recurrent import Body, Core
from jaxroll.networks.torsos import MLP, ConvTorso, Dense, Encoder

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
