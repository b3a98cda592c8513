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
    )
    from jaxroll import (
        checkpoints as checkpoints,
    )
    from jaxroll import (
        collectors as collectors,
    )
    from jaxroll import (
        distributions as distributions,
    )
    from jaxroll import (
        envs as envs,
    )
    from jaxroll import (
        estimators as estimators,
    )
    from jaxroll import (
        learners as learners,
    )
    from jaxroll import (
        losses as losses,
    )
    from jaxroll import (
        minibatches as minibatches,
    )
    from jaxroll import (
        networks as networks,
    )
    from jaxroll import (
        normalizers as normalizers,
    )
    from jaxroll import (
        parallel as parallel,
    )
    from jaxroll import (
        reporting as reporting,
    )
    from jaxroll import (
        spaces as spaces,
    )
    from jaxroll import (
        storages as storages,
    )
    from jaxroll import (
        types as types,
    )
    from jaxroll.agents import (
        A2C as A2C,
    )
    from jaxroll.agents import (
        DAAC as DAAC,
    )
    from jaxroll.agents import (
        IMPALA as IMPALA,
    )
    from jaxroll.agents import (
        PPO as PPO,
    )
    from jaxroll.agents import (
        DistributedAgent as DistributedAgent,
    )
    from jaxroll.agents import (
        OnPolicyAgent as OnPolicyAgent,
    )
    from jaxroll.agents import (
        TrainState as TrainState,
    )
    from jaxroll.collectors import (
        collect as collect,
    )
    from jaxroll.collectors import (
        evaluate as evaluate,
    )
    from jaxroll.collectors import (
        init_actor as init_actor,
    )
    from jaxroll.envs import (
        Env as Env,
    )
    from jaxroll.envs import (
        autoreset as autoreset,
    )
    from jaxroll.envs import (
        make_env as make_env,
    )
    from jaxroll.estimators import (
        discounted_returns as discounted_returns,
    )
    from jaxroll.estimators import (
        gae as gae,
    )
    from jaxroll.estimators import (
        lambda_returns as lambda_returns,
    )
    from jaxroll.estimators import (
        n_step_returns as n_step_returns,
    )
    from jaxroll.estimators import (
        normalize as normalize,
    )
    from jaxroll.estimators import (
        retrace as retrace,
    )
    from jaxroll.estimators import (
        vtrace as vtrace,
    )
    from jaxroll.networks import (
        Policy as Policy,
    )
    from jaxroll.networks import (
        make_policy as make_policy,
    )
    from jaxroll.reporting import (
        History as History,
    )
    from jaxroll.storages import (
        DecoupledRolloutStorage as DecoupledRolloutStorage,
    )
    from jaxroll.storages import (
        DistributedStorage as DistributedStorage,
    )
    from jaxroll.storages import (
        RolloutStorage as RolloutStorage,
    )
    from jaxroll.storages import (
        Storage as Storage,
    )
    from jaxroll.types import (
        Minibatch as Minibatch,
    )
    from jaxroll.types import (
        PolicyOutput as PolicyOutput,
    )
    from jaxroll.types import (
        Targets as Targets,
    )
    from jaxroll.types import (
        TimeStep as TimeStep,
    )
    from jaxroll.types import (
        Transition as Transition,
    )

__all__ = [
    "A2C",
    "DAAC",
    "IMPALA",
    "PPO",
    "DecoupledRolloutStorage",
    "DistributedAgent",
    "DistributedStorage",
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
    "collect",
    "discounted_returns",
    "evaluate",
    "gae",
    "init_actor",
    "lambda_returns",
    "make_env",
    "make_policy",
    "n_step_returns",
    "normalize",
    "retrace",
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
        "make_env",
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
    "jaxroll.reporting": ("History",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
_SUBMODULES = (
    "agents",
    "checkpoints",
    "collectors",
    "distributions",
    "envs",
    "estimators",
    "learners",
    "losses",
    "minibatches",
    "networks",
    "normalizers",
    "parallel",
    "reporting",
    "spaces",
    "storages",
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
