"""Decoupled advantage actor-critic: the policy learns advantages, the value learns on its own.

Policy and value have networks of their own, optimisers of their own, and their own numbers of
epochs: the value can be trained long without the policy forgetting or overfitting.

Defaults: Raileanu and Fergus, 2021 (advantage weight 0.25, one policy epoch, nine value epochs),
with PPO's rollout and step size, at which all of 10 seeds solved CartPole-v1 within 250 k steps
(5e-4 is the paper's, for Procgen). The value is not clipped, as in PPO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxroll import losses, metrics as metrics_lib, networks
from jaxroll.agents.hyperparameters import leaf, static
from jaxroll.agents.on_policy import OnPolicyAgent, checked_loss, gradient_metrics, summed
from jaxroll.agents.states import LearnerState
from jaxroll.learner import map_actors, minibatch_updates
from jaxroll.metrics import Mean, Sum
from jaxroll.storages import DecoupledRolloutStorage
from jaxroll.types import Array, Minibatch, PyTree

VALUE_FOLD = 1  # the value's epochs have shuffles of their own


class DAAC(OnPolicyAgent):
    """DAAC: two networks, two optimisers, two kinds of epochs.

        ℓ_π = ℓ_clip(π) + c_A (Â(s, a) − A)² − c_H H(π)
        ℓ_V = ½ (V − R)², clipped if so chosen

    Example:
      >>> import jaxroll
      >>> daac = jaxroll.DAAC.create("CartPole-v1", num_envs=4, num_steps=8, num_mini_batch=1)
      >>> state = jax.eval_shape(daac.init, jax.random.key(0))  # shapes only: compiles nothing
      >>> state, metrics = jax.eval_shape(daac.train_step, state)
      >>> sorted(state.learner.params)
      ['actor', 'critic']

    Raileanu and Fergus, 2021, https://arxiv.org/abs/2102.10330
    """

    name: ClassVar[str] = "daac"

    num_envs: int = static(16, "environments in total, over all actors", ">= 1")
    num_steps: int = static(64, "steps of each environment per rollout", ">= 1")
    num_epochs: int = static(1, "the policy's passes over each rollout", ">= 1")
    num_mini_batch: int = static(4, "minibatches per pass, of policy and value", ">= 1")
    value_epochs: int = static(9, "the value's passes over a rollout", ">= 1")
    value_freq: int = static(1, "iterations between trainings of the value", ">= 1")
    learning_rate: Array = leaf(1e-3, "step size of the policy's optimiser", "> 0")
    value_learning_rate: Array = leaf(1e-3, "step size of the value's optimiser", "> 0")
    clip_epsilon: Array = leaf(
        0.2, "how far the policy's ratio may move to gain; none: no bound", "> 0", none=float("inf")
    )
    clip_value: bool = static(False, "clip the value's move by clip_epsilon too")
    advantage_coef: Array = leaf(0.25, "weight of the advantage's prediction", ">= 0")
    entropy_coef: Array = leaf(0.01, "weight of the entropy bonus", ">= 0")

    def _default_policy(self) -> Any:
        if self.shared_torso:
            raise ValueError("DAAC never shares its torso: leave shared_torso out, or use PPO.")
        return networks.make_decoupled_policy(
            self.env.observation_space,
            self.env.action_space,
            network=self.network,
            hidden_sizes=self.hidden_sizes,
            activation=self.activation,
            squash=self.squash,
            dtype=self.dtype,
        )

    def make_storage(self, example: Any, carry: PyTree) -> Any:
        """A `DecoupledRolloutStorage`, unless another was given."""
        if self.storage is not None:
            return super().make_storage(example, carry)
        return DecoupledRolloutStorage.create(
            example,
            self.num_steps,
            discount=self.discount,
            gae_lambda=self.gae_lambda,
            initial_carry=carry,
            sequence_length=self.sequence_length,
        )

    def init_optimizer(self, params: PyTree) -> PyTree:
        """One optimiser for the actor, one for the critic."""
        parts = sorted(params) if isinstance(params, Mapping) else type(params).__name__
        if parts != ["actor", "critic"]:
            raise ValueError(
                'DAAC needs a decoupled policy, whose params are {"actor": …, "critic": …}, got '
                f"{parts}. Use policy=jaxroll.networks.make_decoupled_policy(observation_space, "
                "action_space), or leave policy out."
            )
        return {
            name: self.optimizer(self.learning_rate).init(params[name])
            for name in ("actor", "critic")
        }

    def value_optimizer(self, learner: LearnerState) -> optax.GradientTransformation:
        """As the policy's, with its own step size, decaying alike."""
        scale = self.current_learning_rate(learner) / self.learning_rate
        return self.optimizer(self.value_learning_rate * scale)

    def loss(self, params: PyTree, batch: Minibatch) -> tuple[Array, Array, dict[str, Any]]:
        """The policy's loss of one minibatch."""
        step, weights = batch.transition, batch.weights
        output = self.outputs(params, batch)
        log_prob = output.distribution.log_prob(step.action)
        assert batch.targets is not None
        advantages = batch.targets.advantages
        policy_loss, weight = losses.clipped_policy_loss(
            log_prob, step.log_prob, advantages, weights, clip_epsilon=self.clip_epsilon
        )
        predicted = self.policy.act_extras(params, output, step.action)["adv_pred"]
        advantage_loss, _ = losses.advantage_loss(predicted, advantages, weights)
        entropy, _ = losses.entropy_bonus(output.distribution.entropy(), weights)
        total = policy_loss + self.advantage_coef * advantage_loss - self.entropy_coef * entropy
        kl, _ = losses.approximate_kl(log_prob, step.log_prob, weights)
        outside, _ = losses.clip_fraction(
            log_prob, step.log_prob, weights, clip_epsilon=self.clip_epsilon
        )
        sums = {
            "loss": total,
            "policy_loss": policy_loss,
            "advantage_loss": advantage_loss,
            "entropy": entropy,
            "approx_kl": kl,
            "clip_fraction": outside,
        }
        return total, weight, {name: Mean(x, weight) for name, x in sums.items()}

    def value_loss(self, params: PyTree, batch: Minibatch) -> tuple[Array, Array, dict[str, Any]]:
        """The critic's loss of one minibatch."""
        assert batch.targets is not None
        values, returns = self.outputs(params, batch).value, batch.targets.returns
        if self.clip_value:
            total, weight = losses.clipped_value_loss(
                values,
                batch.transition.value,
                returns,
                batch.weights,
                clip_epsilon=self.clip_epsilon,
            )
        else:
            total, weight = losses.value_loss(values, returns, batch.weights)
        return total, weight, {"value_loss": Mean(total, weight)}

    def learn(
        self, learner: LearnerState, actors: Any, storages: Any, across: dict[str, Any]
    ) -> tuple[PyTree, PyTree, dict[str, Any], Any]:
        """The policy's epochs, then the value's."""
        params, opt_state = learner.params, learner.opt_state

        def epochs(rows: Any, fold: int, num_epochs: int, loss: Any, optimizer: Any, name: str):
            plans = map_actors(
                lambda actor, storage: storage.plan(
                    jax.random.fold_in(self.plan_key(actor), fold),
                    num_mini_batch=self.num_mini_batch,
                    num_epochs=num_epochs,
                ),
                actors,
                rows,
                reduction=across["reduction"],
            )
            return minibatch_updates(
                lambda part, batch: checked_loss(
                    loss, self.with_normalizer({**params, name: part}, learner), batch
                ),
                optimizer,
                params[name],
                opt_state[name],
                rows,
                plans,
                prepare=self.prepare,
                **across,
            )

        optimizer = self.optimizer(self.current_learning_rate(learner))
        policy_rows = storages.policy_rows()
        actor, actor_state, metrics, report = epochs(
            policy_rows, 0, self.num_epochs, self.loss, optimizer, "actor"
        )
        value_rows, value_optimizer = storages.value_rows(), self.value_optimizer(learner)

        def train_value() -> tuple[PyTree, PyTree, dict[str, Any]]:
            critic, critic_state, metrics, report = epochs(
                value_rows,
                VALUE_FOLD,
                self.value_epochs,
                self.value_loss,
                value_optimizer,
                "critic",
            )
            return critic, critic_state, summed(metrics) | gradient_metrics(report)

        def leave_value() -> tuple[PyTree, PyTree, dict[str, Any]]:
            shapes = jax.eval_shape(train_value)[2]
            return params["critic"], opt_state["critic"], metrics_lib.zeros_like(shapes)

        due = 1
        if self.value_freq > 1:  # the same on every device, so that all or none take part
            due = (learner.iteration + 1) % self.value_freq == 0
            critic, critic_state, of_value = jax.lax.cond(due, train_value, leave_value)
        else:
            critic, critic_state, of_value = train_value()
        of_policy = summed(metrics) | gradient_metrics(report)
        # In the order of the params' leaves: actor, critic.
        counts = [of_policy["nonfinite"].total, of_value["nonfinite"].total]
        result = of_policy | {
            "value_loss": of_value["value_loss"],
            "value_grad_norm": of_value["grad_norm"],
            "nonfinite": Sum(jnp.concatenate(counts)),
        }
        num_updates = (self.num_epochs + due * self.value_epochs) * self.num_mini_batch
        return (
            {"actor": actor, "critic": critic},
            {"actor": actor_state, "critic": critic_state},
            result,
            num_updates,
        )
