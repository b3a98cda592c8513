"""Environments: JAX's own and those of the host, by name or by hand, in one contract."""

from jaxroll.envs.base import Env, HostEnv, HostEnvSpec, HostStep, autoreset, time_limit
from jaxroll.envs.check import check_env
from jaxroll.envs.gymnasium import from_gymnasium
from jaxroll.envs.gymnax import from_gymnax
from jaxroll.envs.make import Source, as_env, list_envs, make_env, register_source
from jaxroll.envs.vector import VectorHostEnv
from jaxroll.envs.wrappers import (
    ClipAction,
    ClipReward,
    FlattenObservation,
    FrameStack,
    RescaleAction,
    ScaleReward,
    TimeLimit,
    Wrapper,
)

__all__ = [
    "ClipAction",
    "ClipReward",
    "Env",
    "FlattenObservation",
    "FrameStack",
    "HostEnv",
    "HostEnvSpec",
    "HostStep",
    "RescaleAction",
    "ScaleReward",
    "Source",
    "TimeLimit",
    "VectorHostEnv",
    "Wrapper",
    "as_env",
    "autoreset",
    "check_env",
    "from_gymnasium",
    "from_gymnax",
    "list_envs",
    "make_env",
    "register_source",
    "time_limit",
]
