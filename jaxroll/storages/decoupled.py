"""The decoupled rollout storage: policy and value are trained on their own epochs."""

from __future__ import annotations

from typing import Self

import jax
import numpy as np

from jaxroll.checks import check_array
from jaxroll.storages.rollout import RolloutStorage
from jaxroll.types import Minibatch, Targets, Transition


class DecoupledRolloutStorage(RolloutStorage, kw_only=True):
    """A rollout storage whose steps carry a predicted advantage, for algorithms like DAAC.

    `extras["adv_pred"]` is required. `policy_rows` and `value_rows` are the same storage with
    only what one side's loss reads, so that its minibatches gather nothing else.

    Example:
      >>> step = Transition(obs=np.zeros((2, 3)), action=np.zeros(2), reward=np.ones(2),
      ...                   terminated=np.zeros(2, bool), log_prob=np.zeros(2), value=np.zeros(2),
      ...                   extras={"adv_pred": np.zeros(2)})
      >>> storage = DecoupledRolloutStorage.create(step, num_steps=4).before_gradients(np.zeros(2))
      >>> storage.sample_policy(jax.random.key(0), num_mini_batch=2).transition.value is None
      True
    """

    @staticmethod
    def check_example(example: Transition) -> None:
        """As of `RolloutStorage`; the example has extras["adv_pred"] [B]."""
        RolloutStorage.check_example(example)
        extras = example.extras
        if not isinstance(extras, dict) or "adv_pred" not in extras:
            got = sorted(extras) if isinstance(extras, dict) else type(extras).__name__
            raise ValueError(
                f'the example needs extras["adv_pred"], the predicted advantage [B], got extras '
                f'{got}. Write Transition(..., extras={{"adv_pred": ...}}).'
            )
        name, shape = 'extras["adv_pred"]', np.shape(example.terminated)
        check_array(name, extras["adv_pred"], shape, " = [B]")

    def policy_rows(self) -> Self:
        """For the policy's epochs: observations, actions, log-probabilities, advantages."""
        data = self.data.replace(value=None, bootstrap_value=None, reward=None)
        return self.replace(data=data, targets=Targets(self.targets.advantages, None))

    def value_rows(self) -> Self:
        """For the critic's epochs: observations, old values and returns."""
        data = self.data.replace(
            action=None, log_prob=None, extras=None, bootstrap_value=None, reward=None
        )
        return self.replace(data=data, targets=Targets(None, self.targets.returns))

    def sample_policy(self, key: jax.Array, num_mini_batch: int = 8) -> Minibatch:
        """One epoch for the policy, stacked: leaves [M, N, ...]."""
        return self.policy_rows().sample(key, num_mini_batch)

    def sample_value(self, key: jax.Array, num_mini_batch: int = 8) -> Minibatch:
        """One epoch for the critic, stacked: leaves [M, N, ...]."""
        return self.value_rows().sample(key, num_mini_batch)
