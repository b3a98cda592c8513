"""Actor-critics: a distribution over actions and values, on one torso or on two.

`make_policy` and `make_decoupled_policy` pick the layers by the spaces; the result is a `Policy`
that compares by value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxroll import spaces
from jaxroll.checks import (
    check_choice,
    check_count,
    check_dtype,
    check_flag,
    check_number,
    check_sizes,
)
from jaxroll.distributions import Distribution, DistributionFor, distribution_for
from jaxroll.networks.layers import (
    ACTIVATIONS,
    CORES,
    MASK,
    Body,
    Core,
    Dense,
    Encoder,
    flat_entries,
    is_channels_first,
    is_image,
)
from jaxroll.networks.policy import Policy
from jaxroll.types import Array, PolicyOutput, PyTree

NETWORKS = ("auto", "mlp", "cnn", *CORES)
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What decides a default network's layers; made by `make_policy`, compares by value."""

    observation_space: spaces.Space
    kind: DistributionFor
    hidden_sizes: tuple[int, ...]
    activation: str
    convolutional: bool
    core: str | None
    core_size: int
    streams: tuple[str, ...] | None
    log_std_init: float
    dtype: str

    def body(self, name: str) -> Body:
        """A torso, with its core."""
        encoder = Encoder(
            self.observation_space,
            self.hidden_sizes,
            self.activation,
            self.convolutional,
            self.dtype,
            parent=None,
        )
        core = Core(self.core, self.core_size, self.dtype, parent=None) if self.core else None
        return Body(encoder, core, name=name)

    def initial_carry(self, batch_size: int) -> PyTree:
        """Zeros for one body: (hidden, cell) of an LSTM, hidden of a GRU; () without a core."""
        count = {None: 0, "gru": 1, "lstm": 2}[self.core]
        zeros = tuple(jnp.zeros((batch_size, self.core_size), jnp.float32) for _ in range(count))
        return zeros[0] if self.core == "gru" else zeros


class PolicyHead(nn.Module):
    """Features → distribution; for a Box with a learned log_std that no state changes."""

    architecture: Architecture

    @nn.compact
    def __call__(self, features: Array, obs: PyTree) -> Distribution:
        """[..., features] → a distribution with batch axes [...], masked if obs has a mask."""
        kind, space = self.architecture.kind, self.architecture.observation_space
        outputs = Dense(kind.num_outputs, scale=0.01)(features)
        log_std = None
        if kind.has_log_std:
            init = nn.initializers.constant(self.architecture.log_std_init)
            log_std = self.param("log_std", init, (kind.num_outputs,), jnp.float32)
        has_mask = isinstance(space, spaces.Dict) and MASK in space.spaces
        return kind.build(outputs, log_std, obs[MASK] if has_mask else None)


class ValueHead(nn.Module):
    """Features → [...] values, or a dict of them, one per stream."""

    streams: tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, features: Array) -> PyTree:
        """[..., features] → [...]."""
        values = Dense(len(self.streams) if self.streams else 1, scale=1.0)(features)
        if self.streams is None:
            return values[..., 0]
        return {stream: values[..., i] for i, stream in enumerate(self.streams)}


class ActorCritic(nn.Module):
    """Torsos and heads; carries are a body's own if shared, else {"actor": …, "critic": …}."""

    architecture: Architecture
    shared_torso: bool

    def setup(self):
        """One body or two, and the heads."""
        if self.shared_torso:
            self.torso = self.architecture.body("torso")
        else:
            self.actor = self.architecture.body("actor")
            self.critic = self.architecture.body("critic")
        self.policy_head = PolicyHead(self.architecture)
        self.value_head = ValueHead(self.architecture.streams)

    def __call__(self, carry: PyTree, obs: PyTree, is_first: Array):
        """(carry, PolicyOutput); leaves [B, ...], or [T, B, ...] to unroll."""
        if self.shared_torso:
            carry, seen = self.torso(carry, obs, is_first)
            judged = seen
        else:
            actor, critic = split_carry(carry)
            actor, seen = self.actor(actor, obs, is_first)
            critic, judged = self.critic(critic, obs, is_first)
            carry = join_carry(actor, critic)
        return carry, PolicyOutput(self.policy_head(seen, obs), self.value_head(judged))

    def value(self, carry: PyTree, obs: PyTree, is_first: Array) -> PyTree:
        """V alone: a separate actor is not run."""
        if self.shared_torso:
            return self.value_head(self.torso(carry, obs, is_first)[1])
        return self.value_head(self.critic(split_carry(carry)[1], obs, is_first)[1])


def split_carry(carry: PyTree) -> tuple[PyTree, PyTree]:
    """(actor's, critic's)."""
    return (carry["actor"], carry["critic"]) if isinstance(carry, dict) else ((), ())


def join_carry(actor: PyTree, critic: PyTree) -> PyTree:
    """{"actor": …, "critic": …}, or () if there is nothing to carry."""
    return {"actor": actor, "critic": critic} if jax.tree.leaves((actor, critic)) else ()


def run(module: nn.Module, params: PyTree, *arguments: Any, method: str | None = None) -> Any:
    """What a module makes of its arguments under these parameters."""
    if not isinstance(params, Mapping) or not params:
        raise TypeError(f"params must be a dict, as policy.init(key, obs) gives, got {params!r}.")
    return module.apply({"params": params}, *arguments, method=method)


@dataclasses.dataclass(frozen=True)
class NetworkPolicy(Policy):
    """What default policies have in common."""

    architecture: Architecture

    def initial_carry(self, batch_size: int) -> PyTree:
        """{"actor": …, "critic": …}, zeros; () if feed-forward."""
        own = self.architecture.initial_carry
        return join_carry(own(batch_size), own(batch_size))

    def unroll(
        self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """(carry, outputs); leaves [T, B, ...]. The torso sees all rows at once."""
        return self.apply(params, carry, obs, is_first)


@dataclasses.dataclass(frozen=True)
class ActorCriticPolicy(NetworkPolicy):
    """A policy and a value on default networks; made by `make_policy`."""

    shared_torso: bool

    @property
    def module(self) -> ActorCritic:
        """The flax module, for those who want it bare."""
        return ActorCritic(self.architecture, self.shared_torso)

    @property
    def has_separate_value(self) -> bool:
        """Where the torsos are two."""
        return not self.shared_torso

    def init(self, key: jax.Array, obs: PyTree) -> PyTree:
        """{"torso" or "actor" and "critic", "policy_head", "value_head"}."""
        batch = jax.tree.leaves(obs)[0].shape[0]
        is_first = jnp.zeros(batch, bool)
        return self.module.init(key, self.initial_carry(batch), obs, is_first)["params"]

    def initial_carry(self, batch_size: int) -> PyTree:
        """Zeros, of the shared body or of both; () if feed-forward."""
        own = self.architecture if self.shared_torso else super()
        return own.initial_carry(batch_size)

    def apply(
        self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array
    ) -> tuple[PyTree, PolicyOutput]:
        """(carry, output); leaves [B, ...]."""
        return run(self.module, params, carry, obs, is_first)

    def value(self, params: PyTree, carry: PyTree, obs: PyTree, is_first: Array) -> PyTree:
        """V alone, [B] or a dict of streams; a separate actor is not run."""
        return run(self.module, params, carry, obs, is_first, method="value")


def make_policy(
    observation_space: spaces.Space,
    action_space: spaces.Space,
    *,
    network: str = "auto",
    hidden_sizes: tuple[int, ...] | None = None,
    activation: str | None = None,
    shared_torso: bool | None = None,
    core_size: int | None = None,
    streams: tuple[str, ...] | None = None,
    squash: bool = False,
    log_std_init: float = 0.0,
    dtype: Any = "float32",
) -> ActorCriticPolicy:
    """An actor-critic that fits these spaces; no device is touched.

    Kernels are orthogonal: gain √2 in hidden layers, 0.01 for the policy head, 1 for the value
    head (Andrychowicz et al., 2021, https://arxiv.org/abs/2006.05990); biases are 0.

    Args:
      observation_space: vectors and choices (one-hot) go into an MLP, Boxes of three axes
        ([H, W, C], or [C, H, W] for frames of 32 × 32 and more) through convolutions, uint8
        divided by the `high` of its Box; the entries of a Dict are embedded and concatenated. A
        Dict's entry "action_mask" (bool, true where allowed; all choices side by side) masks the
        distribution.
      action_space: see `distribution_for`.
      network: "auto" looks at the observations: "cnn" for images, else "mlp" (which flattens
        images); "lstm" and "gru" add a recurrent core to what "auto" picks.
      hidden_sizes: of the dense layers; None: (64, 64), after convolutions (128,) or (512,).
      activation: of the dense layers; None: "tanh", after convolutions "relu".
      shared_torso: whether actor and critic share all but the heads; None: only where a torso
        is expensive, with convolutions or a core.
      core_size: units of the recurrent core; None: hidden_sizes[-1].
      streams: names of several values; `value` is then a dict. None: one value.
      squash: press continuous actions into their bounds (`TanhGaussian`).
      log_std_init: of continuous actions, before squashing.
      dtype: "float32" or "bfloat16", in which torso and core compute; parameters, carries, logits
        and values are float32.

    Example:
      >>> policy = make_policy(spaces.Box.create(-1, 1, (4,)), spaces.Discrete(2))
      >>> obs, is_first = jnp.zeros((8, 4)), jnp.zeros(8, bool)
      >>> params = policy.init(jax.random.key(0), obs)
      >>> _, output = policy.apply(params, (), obs, is_first)
      >>> output.distribution.sample(jax.random.key(1)).shape, output.value.shape
      ((8,), (8,))
    """
    check_choice("network", network, NETWORKS)
    if not isinstance(observation_space, spaces.Space):
        raise TypeError(
            f"observation_space must be one of jaxroll.spaces, got {observation_space!r}. Use "
            "env.observation_space."
        )
    entries = flat_entries(observation_space)
    images = [space.shape for space in entries.values() if is_image(space)]
    if not entries:
        raise ValueError(
            f"the observation space must have an entry to look at, got {observation_space}."
        )
    if network == "cnn" and not images:
        raise ValueError(
            'network="cnn" needs an observation (or an entry of it) with three axes, '
            f'got {observation_space}. Use network="mlp".'
        )
    convolutional = bool(images) and network != "mlp"
    if activation is None:
        activation = "relu" if convolutional else "tanh"
    if hidden_sizes is None:
        hidden_sizes = _sizes_after_convolutions(images) if convolutional else (64, 64)
    hidden_sizes = check_sizes("hidden_sizes", hidden_sizes)
    if streams is not None and (not streams or len(set(streams)) != len(streams)):
        raise ValueError(f"streams must be different names, at least one, got {streams}.")
    if shared_torso is None:
        shared_torso = convolutional or network in CORES
    architecture = Architecture(
        observation_space=observation_space,
        kind=distribution_for(action_space, squash=check_flag("squash", squash)),
        hidden_sizes=hidden_sizes,
        activation=check_choice("activation", activation, tuple(ACTIVATIONS)),
        convolutional=convolutional,
        core=network if network in CORES else None,
        core_size=hidden_sizes[-1] if core_size is None else check_count("core_size", core_size),
        streams=None if streams is None else tuple(streams),
        log_std_init=float(check_number("log_std_init", log_std_init)),
        dtype=check_dtype("dtype", dtype, DTYPES),
    )
    return ActorCriticPolicy(architecture, check_flag("shared_torso", shared_torso))


def _sizes_after_convolutions(images: list[tuple[int, ...]]) -> tuple[int, ...]:
    """512 after the large convolutions, 128 after the small: as their authors have it."""
    sides = [min(s[1:] if is_channels_first(s) else s[:2]) for s in images]
    return (512,) if max(sides) >= 36 else (128,)
