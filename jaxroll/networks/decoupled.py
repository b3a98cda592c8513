"""Decoupled actor and critic for DAAC: two networks, two sets of parameters, two optimisers.

The actor has a second head that predicts the advantage of the action taken, from the actor's
features and the action. The critic has its own torso and sees no gradient of the policy.

Raileanu & Fergus, 2021, https://arxiv.org/abs/2102.10330
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxroll import spaces
from jaxroll.networks.actor_critic import (
    Architecture,
    NetworkPolicy,
    PolicyHead,
    ValueHead,
    join_carry,
    make_policy,
    run,
    split_carry,
)
from jaxroll.networks.layers import Dense, as_vector
from jaxroll.types import Array, PolicyOutput, PyTree


class Actor(nn.Module):
    """Torso, policy head, advantage head."""

    architecture: Architecture

    def setup(self):
        """A body and two heads."""
        self.torso = self.architecture.body("torso")
        self.policy_head = PolicyHead(self.architecture)
        self.advantage_head = Dense(1, scale=1.0)

    def __call__(self, carry: PyTree, obs: PyTree, is_first: Array):
        """(carry, distribution, features); leaves [B, ...], or [T, B, ...] to unroll."""
        carry, features = self.torso(carry, obs, is_first)
        return carry, self.policy_head(features, obs), features

    def advantage(self, features: Array, action: Array) -> Array:
        """[..., features] and actions → [...]."""
        seen = as_vector(self.architecture.kind.space, action)
        both = jnp.concatenate([features.astype(jnp.float32), seen], axis=-1)
        return self.advantage_head(both)[..., 0]

    def everything(self, carry: PyTree, obs: PyTree, is_first: Array, action: Array) -> Array:
        """Runs all parts once, so that all have parameters."""
        return self.advantage(self(carry, obs, is_first)[2], action)


class Critic(nn.Module):
    """A torso of its own and the value head."""

    architecture: Architecture

    def setup(self):
        """A body and a head."""
        self.torso = self.architecture.body("torso")
        self.value_head = ValueHead(self.architecture.streams)

    def __call__(self, carry: PyTree, obs: PyTree, is_first: Array):
        """(carry, values); leaves [B, ...], or [T, B, ...] to unroll."""
        carry, features = self.torso(carry, obs, is_first)
        return carry, self.value_head(features)


@dataclasses.dataclass(frozen=True)
class DecoupledPolicy(NetworkPolicy):
    """An actor that predicts advantages, and a critic apart; made by `make_decoupled_policy`.

    `params` is {"actor": …, "critic": …}. The value reads the critic's parameters only; the
    distribution and the predicted advantage read the actor's only.

    The output's `extras` hold the actor's features; `act_extras` makes of them and the action
    what is stored: {"adv_pred": [B]}. A loss calls `advantage` on what `unroll` or `apply` gave.
    """

    @property
    def has_separate_value(self) -> bool:
        """Always: the critic is a network of its own."""
        return True

    def init(self, key: jax.Array, obs: PyTree) -> PyTree:
        """{"actor": …, "critic": …}."""
        batch = jax.tree.leaves(obs)[0].shape[0]
        seen = self.architecture.initial_carry(batch), obs, jnp.zeros(batch, bool)
        action = jnp.asarray(spaces.zeros(self.architecture.kind.space, (batch,)))
        actor_key, critic_key = jax.random.split(key)
        actor = Actor(self.architecture).init(actor_key, *seen, action, method="everything")
        critic = Critic(self.architecture).init(critic_key, *seen)
        return {"actor": actor["params"], "critic": critic["params"]}

    def apply(
        self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """(carry, output); leaves [B, ...]."""
        actor, critic = split_carry(carry)
        actor, distribution, features = run(
            Actor(self.architecture), params["actor"], actor, obs, is_first
        )
        critic, value = run(Critic(self.architecture), params["critic"], critic, obs, is_first)
        output = PolicyOutput(distribution, value, extras={"features": features})
        return join_carry(actor, critic), output

    def value(self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array) -> PyTree:
        """V alone: the actor is not run."""
        seen = split_carry(carry)[1], obs, is_first
        return run(Critic(self.architecture), params["critic"], *seen)[1]

    def advantage(self, params: PyTree, output: PolicyOutput, action: PyTree) -> Array:
        """Â(s, a) of actions in the observations that gave `output`; its batch axes."""
        features = output.extras["features"]
        return run(Actor(self.architecture), params["actor"], features, action, method="advantage")

    def act_extras(self, params: PyTree, output: PolicyOutput, action: PyTree) -> PyTree:
        """{"adv_pred": Â(s, a)}."""
        return {"adv_pred": self.advantage(params, output, action)}


def make_decoupled_policy(
    observation_space: spaces.Space, action_space: spaces.Space, **options: Any
) -> DecoupledPolicy:
    """An actor with an advantage head, and a critic with a torso of its own.

    Args:
      observation_space: see `make_policy`.
      action_space: see `make_policy`.
      **options: those of `make_policy`, but for `shared_torso`: network, hidden_sizes,
        activation, core_size, streams, squash, log_std_init, dtype.

    Example:
      >>> policy = make_decoupled_policy(spaces.Box.create(-1, 1, (4,)), spaces.Discrete(2))
      >>> obs = jnp.zeros((8, 4))
      >>> params = policy.init(jax.random.key(0), obs)
      >>> _, output = policy.apply(params, (), obs, jnp.zeros(8, bool))
      >>> sorted(params), policy.advantage(params, output, jnp.zeros(8, int)).shape
      (['actor', 'critic'], (8,))
    """
    if "shared_torso" in options:
        raise ValueError(
            "a decoupled policy never shares its torso: leave shared_torso out, or use "
            "make_policy(..., shared_torso=...)."
        )
    return DecoupledPolicy(make_policy(observation_space, action_space, **options).architecture)
