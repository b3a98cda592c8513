"""From observations to features: dense, convolutional and recurrent layers."""

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
CORES = ("lstm", "gru")
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
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        y = product(rows, kernel.astype(self.dtype)) + bias.astype(self.dtype)[None]
        return ACTIVATIONS[self.activation](y).reshape(*x.shape[:-1], self.features)


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
            x = jax.nn.relu(SmallConv(16, min(3, side), dtype=self.dtype)(x))
            return x.reshape(x.shape[0], -1)
        options = {"padding": "VALID", "kernel_init": nn.initializers.orthogonal(math.sqrt(2))}
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            conv = nn.Conv(features, (size, size), stride, dtype=self.dtype, **options)
            x = jax.nn.relu(conv(x))
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


def is_image(space: LeafSpace) -> bool:
    """Whether it is a Box of three axes."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3


def highest_byte(space: LeafSpace) -> float:
    """The largest value that a uint8 observation of this space has; at least 1."""
    if not isinstance(space, spaces.Box):
        return 1.0
    return float(np.clip(np.max(space.high, initial=1.0), 1.0, 255.0))


def scaled(x: Array, high: float, dtype: str) -> Array:
    """Uint8 numbers divided by `high`, all others as they are."""
    y = x.astype(dtype)
    return y / high if x.dtype == jnp.uint8 else y


def as_vector(space: LeafSpace, x: Array, dtype: str = "float32") -> Array:
    """[..., *shape] → [..., features]: choices become one-hot, all else is flattened."""
    match space:
        case spaces.Discrete(n=n):
            return jax.nn.one_hot(x, n, dtype=dtype)
        case spaces.MultiDiscrete(nvec=nvec):
            parts = [jax.nn.one_hot(x[..., i], n, dtype=dtype) for i, n in enumerate(nvec)]
            return jnp.concatenate(parts, axis=-1)
        case _:
            batch = x.shape[: x.ndim - len(space.shape)]
            x = x.reshape(*batch, spaces.flat_size(space))
            return scaled(x, highest_byte(space), dtype)


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
            if self.convolutional and is_image(space):
                part = ConvTorso(self.dtype, highest_byte(space))(x)
            else:
                part = as_vector(space, x, self.dtype)
            if len(entries) > 1:
                part = Dense(self.hidden_sizes[0], self.activation, dtype=self.dtype)(part)
            parts.append(part)
        x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        return MLP(self.hidden_sizes, self.activation, self.dtype)(x)


class Core(nn.Module):
    """An LSTM or GRU of `size` units, whose carry restarts where an episode starts.

    LSTM  i, f, o = σ(·), g = tanh(·);  c' = f c + i g;  h' = o tanh(c')
    GRU   r, z = σ(·), n = tanh(Wₙx + r (Uₙh + bₙ));  h' = (1 − z) n + z h
    """

    kind: str
    size: int
    dtype: str = "float32"

    def setup(self):
        """One product with the input, one with the state, for all gates."""
        gates = (4 if self.kind == "lstm" else 3) * self.size
        self.input = Dense(gates, scale=1.0, dtype=self.dtype)
        self.state = Dense(gates, scale=1.0, dtype=self.dtype)

    def __call__(self, carry: PyTree, x: Array, is_first: Array) -> tuple[PyTree, Array]:
        """(carry [B, ...], [B, in], [B]) → (carry, [B, size]), or T steps of it, [T, B, ...].

        The product with the input is one for all rows; only that with the state is left to the
        scan over time.
        """
        step = Core._step
        if is_first.ndim == 2:
            step = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        return step(self, carry, (self.input(x), is_first))

    def _step(self, carry: PyTree, inputs: tuple[Array, Array]) -> tuple[PyTree, Array]:
        projected, is_first = inputs
        carry = jax.tree.map(lambda x: jnp.where(is_first[:, None], jnp.zeros_like(x), x), carry)
        if self.kind == "gru":
            hidden = carry
            r, z, n = jnp.split(projected.astype(jnp.float32), 3, axis=-1)
            hr, hz, hn = jnp.split(self.state(hidden).astype(jnp.float32), 3, axis=-1)
            z = jax.nn.sigmoid(z + hz)
            n = jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn)
            hidden = (1 - z) * n + z * hidden
            return hidden, hidden
        hidden, cell = carry
        i, f, g, o = jnp.split((projected + self.state(hidden)).astype(jnp.float32), 4, axis=-1)
        # The forget gate starts open: memory lasts before anything is learnt.
        cell = jax.nn.sigmoid(f + 1) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden


class Body(nn.Module):
    """An encoder, and a core after it if `core` is not None: what a head sits on."""

    encoder: nn.Module
    core: Core | None = None

    def __call__(self, carry: PyTree, obs: PyTree, is_first: Array) -> tuple[PyTree, Array]:
        """One step, leaves [B, ...] → (carry, [B, features]), or T steps, [T, B, ...]."""
        if is_first.ndim == 2:
            obs = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), obs)
        x = self.encoder(obs)
        x = x.reshape(*is_first.shape, x.shape[-1])
        return (carry, x) if self.core is None else self.core(carry, x, is_first)
