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
    PolicyHead,
    ValueHead,
    action_mask,
    architecture,
    join_carry,
    run,
    split_carry,
)
from jaxroll.networks.base import Policy
from jaxroll.networks.torsos import Dense
from jaxroll.types import Array, PolicyOutput, PyTree


class Actor(nn.Module):
    """Torso, policy head, advantage head."""

    architecture: Architecture

    def setup(self):
        """A body and two heads."""
        self.torso = self.architecture.body("torso")
        self.policy_head = PolicyHead(self.architecture.kind, self.architecture.log_std_init)
        self.advantage_head = Dense(1, scale=1.0)

    def __call__(self, carry: PyTree, obs: PyTree, is_first: Array, unroll: bool = False):
        """(carry, distribution, features)."""
        carry, features = (self.torso.unroll if unroll else self.torso)(carry, obs, is_first)
        return carry, self.policy_head(features, action_mask(self.architecture, obs)), features

    def advantage(self, features: Array, action: Array) -> Array:
        """[..., features] and actions → [...]."""
        seen = as_features(self.architecture.kind.space, action)
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

    def __call__(self, carry: PyTree, obs: PyTree, is_first: Array, unroll: bool = False):
        """(carry, values)."""
        carry, features = (self.torso.unroll if unroll else self.torso)(carry, obs, is_first)
        return carry, self.value_head(features)


def as_features(space: Any, action: Array) -> Array:
    """[..., *action] → [..., features]: choices one-hot, all else flattened."""
    match space:
        case spaces.Discrete(n=n):
            return jax.nn.one_hot(action, n)
        case spaces.MultiDiscrete(nvec=nvec):
            parts = [jax.nn.one_hot(action[..., i], n) for i, n in enumerate(nvec)]
            return jnp.concatenate(parts, axis=-1)
    batch = action.shape[: action.ndim - len(space.shape)]
    return action.reshape(*batch, spaces.flat_size(space)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class DecoupledPolicy(Policy):
    """An actor that predicts advantages, and a critic apart; made by `make_decoupled_policy`.

    `params` is {"actor": …, "critic": …}. The value reads the critic's parameters only; the
    distribution and the predicted advantage read the actor's only.

    The output's `extras` hold the actor's features; `act_extras` makes of them and the action
    what is stored: {"adv_pred": [B]}. A loss calls `advantage` on what `unroll` or `apply` gave.
    """

    architecture: Architecture

    @property
    def has_separate_value(self) -> bool:
        """Always: the critic is a network of its own."""
        return True

    def init(self, key: jax.Array, obs: PyTree) -> PyTree:
        """{"actor": …, "critic": …}."""
        batch = jax.tree.leaves(obs)[0].shape[0]
        carry, is_first = self.architecture.initial_carry(batch), jnp.zeros(batch, bool)
        action = jnp.asarray(spaces.zeros(self.architecture.kind.space, (batch,)))
        actor_key, critic_key = jax.random.split(key)
        actor = Actor(self.architecture)
        critic = Critic(self.architecture)
        return {
            "actor": actor.init(actor_key, carry, obs, is_first, action, method="everything")[
                "params"
            ],
            "critic": critic.init(critic_key, carry, obs, is_first)["params"],
        }

    def initial_carry(self, batch_size: int) -> PyTree:
        """{"actor": …, "critic": …}; () if feed-forward."""
        own = self.architecture.initial_carry
        return join_carry(own(batch_size), own(batch_size))

    def _run(
        self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array, unroll: bool
    ) -> tuple[PyTree, PolicyOutput]:
        actor_carry, critic_carry = split_carry(carry)
        actor_carry, distribution, features = run(
            Actor(self.architecture), params["actor"], actor_carry, obs, is_first, unroll=unroll
        )
        critic_carry, value = run(
            Critic(self.architecture), params["critic"], critic_carry, obs, is_first, unroll=unroll
        )
        output = PolicyOutput(distribution, value, extras={"features": features})
        return join_carry(actor_carry, critic_carry), output

    def apply(
        self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """(carry, output); leaves [B, ...]."""
        return self._run(params, carry, obs, is_first, unroll=False)

    def unroll(
        self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """(carry, outputs); leaves [T, B, ...]."""
        return self._run(params, carry, obs, is_first, unroll=True)

    def value(self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array) -> PyTree:
        """V alone: the actor is not run."""
        critic_carry = split_carry(carry)[1]
        _, value = run(Critic(self.architecture), params["critic"], critic_carry, obs, is_first)
        return value

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
    return DecoupledPolicy(architecture(observation_space, action_space, **options))
