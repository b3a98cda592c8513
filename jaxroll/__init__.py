"""jaxroll: rollouts, advantages and minibatches as parts that live inside your own jit.

Names load when they are first used, so that `import jaxroll` costs next to nothing and touches no
device. See the README for the conventions (axes, truncation, keys, logical actors).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxroll._version import __version__

if TYPE_CHECKING:
    from jaxroll import (
        agents as agents,
        collectors as collectors,
        distributions as distributions,
        envs as envs,
        estimators as estimators,
        learner as learner,
        losses as losses,
        metrics as metrics,
        networks as networks,
        normalizers as normalizers,
        parallel as parallel,
        spaces as spaces,
        storages as storages,
        train as train,
        types as types,
    )
    from jaxroll.agents import (
        A2C as A2C,
        DAAC as DAAC,
        IMPALA as IMPALA,
        PPO as PPO,
        DistributedAgent as DistributedAgent,
        OnPolicyAgent as OnPolicyAgent,
        TrainState as TrainState,
    )
    from jaxroll.collectors import (
        collect as collect,
        evaluate as evaluate,
        init_actor as init_actor,
    )
    from jaxroll.config import Config as Config
    from jaxroll.envs import (
        Env as Env,
        autoreset as autoreset,
        check_env as check_env,
        list_envs as list_envs,
        make_env as make_env,
    )
    from jaxroll.estimators import (
        discounted_returns as discounted_returns,
        gae as gae,
        lambda_returns as lambda_returns,
        n_step_returns as n_step_returns,
        normalize as normalize,
        retrace as retrace,
        vtrace as vtrace,
    )
    from jaxroll.export import (
        export_policy as export_policy,
        load_policy as load_policy,
    )
    from jaxroll.networks import (
        Policy as Policy,
        make_policy as make_policy,
    )
    from jaxroll.storages import (
        DecoupledRolloutStorage as DecoupledRolloutStorage,
        DistributedStorage as DistributedStorage,
        RolloutStorage as RolloutStorage,
        Storage as Storage,
    )
    from jaxroll.sweeps import sweep as sweep
    from jaxroll.train.history import (
        History as History,
    )
    from jaxroll.trainer import DistributedTrainer as DistributedTrainer
    from jaxroll.types import (
        Minibatch as Minibatch,
        PolicyOutput as PolicyOutput,
        Targets as Targets,
        TimeStep as TimeStep,
        Transition as Transition,
    )

__all__ = [
    "A2C",
    "DAAC",
    "IMPALA",
    "PPO",
    "Config",
    "DecoupledRolloutStorage",
    "DistributedAgent",
    "DistributedStorage",
    "DistributedTrainer",
    "Env",
    "History",
    "Minibatch",
    "OnPolicyAgent",
    "Policy",
    "PolicyOutput",
    "RolloutStorage",
    "Storage",
    "Targets",
    "TimeStep",
    "TrainState",
    "Transition",
    "__version__",
    "autoreset",
    "check_env",
    "collect",
    "discounted_returns",
    "evaluate",
    "export_policy",
    "gae",
    "init_actor",
    "lambda_returns",
    "list_envs",
    "load_policy",
    "make_env",
    "make_policy",
    "n_step_returns",
    "normalize",
    "retrace",
    "sweep",
    "vtrace",
]

_ROOMS = {
    "jaxroll.types": (
        "Minibatch",
        "PolicyOutput",
        "Targets",
        "TimeStep",
        "Transition",
    ),
    "jaxroll.estimators": (
        "discounted_returns",
        "gae",
        "lambda_returns",
        "n_step_returns",
        "normalize",
        "retrace",
        "vtrace",
    ),
    "jaxroll.storages": (
        "DecoupledRolloutStorage",
        "DistributedStorage",
        "RolloutStorage",
        "Storage",
    ),
    "jaxroll.envs": (
        "Env",
        "autoreset",
        "check_env",
        "make_env",
        "list_envs",
    ),
    "jaxroll.networks": (
        "Policy",
        "make_policy",
    ),
    "jaxroll.collectors": (
        "collect",
        "evaluate",
        "init_actor",
    ),
    "jaxroll.agents": (
        "A2C",
        "DAAC",
        "DistributedAgent",
        "IMPALA",
        "OnPolicyAgent",
        "PPO",
        "TrainState",
    ),
    "jaxroll.config": ("Config",),
    "jaxroll.export": ("export_policy", "load_policy"),
    "jaxroll.sweeps": ("sweep",),
    "jaxroll.trainer": ("DistributedTrainer",),
    "jaxroll.train.history": ("History",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
_SUBMODULES = (
    "agents",
    "collectors",
    "distributions",
    "envs",
    "estimators",
    "learner",
    "losses",
    "metrics",
    "networks",
    "normalizers",
    "parallel",
    "spaces",
    "storages",
    "train",
    "types",
)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"jaxroll.{name}")
    else:
        raise AttributeError(f"module 'jaxroll' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
