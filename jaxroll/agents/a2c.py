"""Advantage actor-critic: one gradient step on each short rollout.

The synchronous form of A3C (Mnih et al., 2016), by default with Adam.

Defaults: whole returns up to the rollout's end (λ = 1) and the weights of the losses are those of
A3C, but for the entropy's: advantages are not normalised, and returns of CartPole's size drown the
paper's 0.01. With 0.1, 16 x 16 steps and 2e-3, all of 10 seeds had CartPole-v1 solved after 500 k
steps; in a run of three seeds that rounded in another way, one stood at a return of 341 there.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxroll import losses
from jaxroll.agents.hyperparameters import leaf, static
from jaxroll.agents.on_policy import OnPolicyAgent
from jaxroll.learner import adds_over_rows
from jaxroll.metrics import Mean
from jaxroll.types import Array, Minibatch, PyTree


class A2C(OnPolicyAgent):
    """A2C: the plain policy gradient with an advantage from the critic.

        ℓ = −A log π(a) + c_v ℓ_value − c_H H(π)

    Example:
      >>> import jax, jaxroll
      >>> a2c = jaxroll.A2C.create("CartPole-v1", num_envs=4)
      >>> state = jax.eval_shape(a2c.init, jax.random.key(0))  # shapes only: compiles nothing
      >>> state, metrics = jax.eval_shape(a2c.train_step, state)
      >>> state.actors.obs.shape, "entropy" in metrics
      ((1, 4, 4), True)

    Mnih et al., 2016, https://arxiv.org/abs/1602.01783
    """

    name: ClassVar[str] = "a2c"

    num_envs: int = static(16, "environments in total, over all actors", ">= 1")
    num_steps: int = static(16, "steps of each environment per rollout", ">= 1")
    gae_lambda: PyTree = leaf(
        1.0, "λ of the advantage estimate; or one for each stream", "in [0, 1]", streams=True
    )
    learning_rate: Array = leaf(2e-3, "step size of the optimiser", "> 0")
    normalize_advantage: str | None = static(
        None,
        "advantages to mean 0 and deviation 1: per minibatch, per rollout, or none",
        choices=("minibatch", "rollout", None),
    )
    value_coef: Array = leaf(0.5, "weight of the value loss", ">= 0")
    entropy_coef: Array = leaf(0.1, "weight of the entropy bonus", ">= 0")

    @adds_over_rows
    def loss(self, params: PyTree, batch: Minibatch) -> tuple[Array, Array, dict[str, Any]]:
        """Policy gradient, value loss and entropy of the rollout."""
        step, weights = batch.transition, batch.weights
        assert batch.targets is not None
        output = self.outputs(params, batch)
        log_prob = output.distribution.log_prob(step.action)
        policy_loss, weight = losses.policy_gradient_loss(
            log_prob, batch.targets.advantages, weights
        )
        value_loss, _ = losses.value_loss(output.value, batch.targets.returns, weights)
        entropy, _ = losses.entropy_bonus(output.distribution.entropy(), weights)
        total = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        # 0 at the first gradient step on a rollout: the policy is still the one that acted.
        kl, _ = losses.approximate_kl(log_prob, step.log_prob, weights)
        sums = {
            "loss": total,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": kl,
        }
        return total, weight, {name: Mean(x, weight) for name, x in sums.items()}
