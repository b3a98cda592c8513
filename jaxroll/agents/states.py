"""What training changes, as pytrees: the learner's state, and all of it."""

from __future__ import annotations

from typing import Any

import jax

from jaxroll.normalizers import RewardScaler, RunningStatistics
from jaxroll.types import ActorState, Array, Node, PyTree


class LearnerState(Node):
    """What all actors and learners have in common; replicated over the devices.

    Attributes:
      params: of the policy.
      opt_state: of the optimiser.
      obs_statistics: where observations are normalised, else None.
      reward_scaler: where rewards are normalised, else None.
      iteration: [] int32 train steps done.
      version: [] int32 optimiser steps done.
      num_episodes: [2] uint32 episodes finished (see `jaxroll.counts`).
      num_env_steps: [2] uint32 environment steps taken.
      extras: an algorithm's own state: saved, replicated and swept like the rest.
    """

    params: PyTree
    opt_state: PyTree
    obs_statistics: RunningStatistics | None
    reward_scaler: RewardScaler | None
    iteration: Array
    version: Array
    num_episodes: Array
    num_env_steps: Array
    extras: PyTree = None


class TrainState(Node):
    """Everything that training changes: save it, and the run goes on as if it had not stopped.

    Example, its shapes:
      >>> import jaxroll
      >>> ppo = jaxroll.PPO.create("CartPole-v1", num_envs=8, num_actors=2)
      >>> state = jax.eval_shape(ppo.init, jax.random.key(0))
      >>> state.learner.iteration.shape, state.actors.obs.shape
      ((), (2, 4, 4))

    Attributes:
      learner: replicated over the devices.
      actors: leaves [A, ...], spread over the devices.
      storage: what outlives an iteration, such as IMPALA's ring of unrolls.
    """

    learner: LearnerState
    actors: ActorState
    storage: PyTree = None


def check_state(state: Any) -> None:
    """Raise for anything but a `TrainState`."""
    if not isinstance(state, TrainState):
        raise TypeError(
            "state must be a TrainState, as agent.init, train and load give it; got a "
            f"{type(state).__name__}. For params alone, train has init_model_path."
        )


def key_shape() -> Any:
    """The shape of a key, for `jax.eval_shape`."""
    return jax.eval_shape(lambda: jax.random.key(0))
