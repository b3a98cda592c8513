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
from jaxroll._version import __version__ as __version__
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
from jaxroll.train.history import History as History
from jaxroll.trainer import DistributedTrainer as DistributedTrainer
from jaxroll.types import (
    Minibatch as Minibatch,
    PolicyOutput as PolicyOutput,
    Targets as Targets,
    TimeStep as TimeStep,
    Transition as Transition,
)
