"""REINFORCE: an algorithm of one's own in one loss.

The agent gives the loss; training, evaluation, several actors, meshes, checkpoints, logs and
resume come from `OnPolicyAgent`. Run it: `python examples/reinforce.py --steps 300000`.
"""

import argparse
from typing import ClassVar

from jaxroll import losses
from jaxroll.agents import OnPolicyAgent
from jaxroll.agents.hyperparameters import leaf, static
from jaxroll.metrics import Mean


class REINFORCE(OnPolicyAgent):
    """The policy gradient with whole returns and a learned baseline.

        ℓ = −(G − V(s)) log π(a|s) + ½ c_v (V(s) − G)²

    Williams, 1992, https://doi.org/10.1007/BF00992696
    """

    name: ClassVar[str] = "reinforce"

    num_envs: int = static(16, "environments in total, over all actors", ">= 1")
    num_steps: int = static(32, "steps of each environment per rollout", ">= 1")
    gae_lambda: float = leaf(1.0, "1: the return itself, up to the rollout's end", "in [0, 1]")
    learning_rate: float = leaf(2e-3, "step size of the optimiser", "> 0")
    value_coef: float = leaf(0.5, "weight of the baseline's loss", ">= 0")

    def loss(self, params, batch):
        """(Σ w·ℓ, Σ w, metrics) of one actor's minibatch."""
        assert batch.targets is not None  # the storage computed them
        output = self.outputs(params, batch)
        log_prob = output.distribution.log_prob(batch.transition.action)
        policy_loss, weight = losses.policy_gradient_loss(
            log_prob, batch.targets.advantages, batch.weights
        )
        value_loss, _ = losses.value_loss(output.value, batch.targets.returns, batch.weights)
        total = policy_loss + self.value_coef * value_loss
        metrics = {"loss": Mean(total, weight), "value_loss": Mean(value_loss, weight)}
        return total, weight, metrics


def main():
    """Train on CartPole, then play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    agent = REINFORCE.create("CartPole-v1", decay_steps=args.steps)
    state, _ = agent.train(args.steps, seed=args.seed)
    print("return over 100 episodes:", agent.eval(state, 100)["episode_return"])


if __name__ == "__main__":
    main()
