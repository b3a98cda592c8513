"""From observations to features: dense and convolutional layers, and which to use when."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxroll import spaces
from jaxroll.networks.cpu_products import convolution, product
from jaxroll.types import Array, PyTree

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "leaky_relu": jax.nn.leaky_relu,
    "softplus": jax.nn.softplus,
    "identity": lambda x: x,
}
LeafSpace = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box
MASK = "action_mask"  # the entry of a dict observation that masks actions


class Dense(nn.Module):
    """activation(x W + b); W [in, features] starts orthogonal, b at 0."""

    features: int
    activation: str = "identity"
    scale: float = math.sqrt(2)
    dtype: str = "float32"  # of the computation; parameters are float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[..., in] → [..., features]."""
        init = nn.initializers.orthogonal(self.scale)
        kernel = self.param("kernel", init, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        kernel, bias = kernel.astype(self.dtype), bias.astype(self.dtype)
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        y = ACTIVATIONS[self.activation](product(rows, kernel) + bias[None])
        return y.reshape(*x.shape[:-1], self.features)


class MLP(nn.Module):
    """Dense layers one after the other."""

    hidden_sizes: tuple[int, ...]
    activation: str = "tanh"
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[N, in] → [N, hidden_sizes[-1]]."""
        for size in self.hidden_sizes:
            x = Dense(size, self.activation, dtype=self.dtype)(x)
        return x


def is_channels_first(shape: tuple[int, ...]) -> bool:
    """Whether an image looks like a stack of frames, [C, H, W], as Atari wrappers give it."""
    return shape[0] <= 16 and min(shape[1:]) >= 32


class ConvTorso(nn.Module):
    """Convolutions chosen by the image's size, flattened.

    From 36 × 36 on: 32 of 8×8 stride 4, 64 of 4×4 stride 2, 64 of 3×3 (Mnih et al., 2015).
    Smaller: 16 of 3×3, as in MinAtar's own agents (Young & Tian, 2019).
    """

    dtype: str = "float32"
    high: float = 255.0  # the largest value of a uint8 image, by which it is divided

    @nn.compact
    def __call__(self, image: Array) -> Array:
        """[N, H, W, C] or [N, C, H, W] → [N, features]; uint8 is divided by `high`."""
        x = scaled(image, self.high, self.dtype)
        if is_channels_first(image.shape[1:]):
            x = jnp.moveaxis(x, 1, -1)
        side = min(x.shape[1:3])
        if side < 36:
            x = SmallConv(16, min(3, side), dtype=self.dtype)(x)
            return jax.nn.relu(x).reshape(x.shape[0], -1)
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.Conv(
                features,
                (size, size),
                (stride, stride),
                padding="VALID",
                kernel_init=nn.initializers.orthogonal(math.sqrt(2)),
                dtype=self.dtype,
            )(x)
            x = jax.nn.relu(x)
        return x.reshape(x.shape[0], -1)


class SmallConv(nn.Module):
    """`nn.Conv` with padding "VALID", for small images; fast on a CPU too."""

    features: int
    size: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[N, H, W, C] → [N, H', W', features], H' = H − size + 1."""
        init = nn.initializers.orthogonal(math.sqrt(2))
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        y = convolution(x, kernel.astype(self.dtype))
        return y + bias.astype(self.dtype)[None, None, None]


def flat_entries(space: spaces.Space, prefix: str = "") -> dict[str, LeafSpace]:
    """The parts of a (nested) Dict by name, "a/b"; the action mask is not one of them."""
    if not isinstance(space, spaces.Dict):
        return {prefix: space}
    entries = {}
    for name, sub in space.items:
        if prefix or name != MASK:
            entries |= flat_entries(sub, f"{prefix}/{name}" if prefix else name)
    return entries


def has_image(space: spaces.Space) -> bool:
    """Whether an observation, or a part of it, is an image: a Box of three axes."""
    parts = flat_entries(space).values()
    return any(isinstance(part, spaces.Box) and len(part.shape) == 3 for part in parts)


def highest_byte(space: LeafSpace) -> float:
    """The largest value that a uint8 observation of this space has; at least 1."""
    if not isinstance(space, spaces.Box):
        return 1.0
    return float(np.clip(np.max(space.high, initial=1.0), 1.0, 255.0))


def scaled(obs: Array, high: float, dtype: str) -> Array:
    """Uint8 observations divided by `high`, all others as they are."""
    x = obs.astype(dtype)
    return x / high if obs.dtype == jnp.uint8 else x


def as_vector(space: LeafSpace, obs: Array, dtype: str) -> Array:
    """[N, ...] → [N, features]: choices become one-hot, all else is flattened."""
    match space:
        case spaces.Discrete(n=n):
            return jax.nn.one_hot(obs, n, dtype=dtype)
        case spaces.MultiDiscrete(nvec=nvec):
            parts = [jax.nn.one_hot(obs[:, i], n, dtype=dtype) for i, n in enumerate(nvec)]
            return jnp.concatenate(parts, axis=-1)
        case _:
            return scaled(obs.reshape(obs.shape[0], -1), highest_byte(space), dtype)


class Encoder(nn.Module):
    """Observation → features, for any observation space.

    Vectors go straight into the MLP; images through convolutions first (unless
    `convolutional` is False: then they are flattened). The entries of a dict are embedded one by
    one, concatenated, and then go into the MLP.
    """

    space: spaces.Space
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    convolutional: bool = True
    dtype: str = "float32"

    @nn.compact
    def __call__(self, obs: PyTree) -> Array:
        """Leaves [N, ...] → [N, features]."""
        entries = flat_entries(self.space)
        parts = []
        for name, space in entries.items():
            x = obs
            for step in name.split("/") if name else ():
                x = x[step]
            if x.shape[1:] != space.shape:
                where = f" {name!r}" if name else ""
                raise ValueError(
                    f"observation{where} must have shape [batch, *{space.shape}] for {space}, "
                    f"got {x.shape}."
                )
            image = isinstance(space, spaces.Box) and len(space.shape) == 3
            if image and self.convolutional:
                part = ConvTorso(self.dtype, highest_byte(space))(x)
            else:
                part = as_vector(space, x, self.dtype)
            if len(entries) > 1:
                part = Dense(self.hidden_sizes[0], self.activation, dtype=self.dtype)(part)
            parts.append(part)
        x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        return MLP(self.hidden_sizes, self.activation, self.dtype)(x)
