"""Recurrent cores: LSTM and GRU whose carry restarts where an episode starts.

What depends on the input alone is computed for all rows at once (`project`); only the product
with the state is left for the scan over time (`step`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jaxroll.networks.torsos import Dense
from jaxroll.types import Array, PyTree

CORES = ("lstm", "gru")


def restart(carry: PyTree, is_first: Array) -> PyTree:
    """The carry [B, ...], zero where an episode starts (is_first [B])."""

    def clear(x: Array) -> Array:
        fresh = is_first.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(fresh, jnp.zeros_like(x), x)

    return jax.tree.map(clear, carry)


def initial_carry(kind: str, size: int, batch_size: int) -> PyTree:
    """Zeros: (hidden, cell) [B, size] for an LSTM, hidden [B, size] for a GRU."""
    if kind == "gru":
        return jnp.zeros((batch_size, size), jnp.float32)
    return tuple(jnp.zeros((batch_size, size), jnp.float32) for _ in range(2))


class Core(nn.Module):
    """An LSTM or GRU of `size` units.

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
        """One step: (carry, [B, in], [B]) → (carry, [B, size])."""
        return self._step(carry, self.input(x), is_first)

    def unroll(self, carry: PyTree, x: Array, is_first: Array) -> tuple[PyTree, Array]:
        """T steps: (carry [B, ...], [T, B, in], [T, B]) → (carry, [T, B, size])."""

        def step(core: Core, carry: PyTree, inputs: tuple) -> tuple[PyTree, Array]:
            return core._step(carry, *inputs)

        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        return scan(self, carry, (self.input(x), is_first))

    def _step(self, carry: PyTree, projected: Array, is_first: Array) -> tuple[PyTree, Array]:
        carry = restart(carry, is_first)
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
        """One step: leaves [B, ...] → (carry, [B, features])."""
        x = self.encoder(obs)
        return (carry, x) if self.core is None else self.core(carry, x, is_first)

    def unroll(self, carry: PyTree, obs: PyTree, is_first: Array) -> tuple[PyTree, Array]:
        """T steps: leaves [T, B, ...] → (carry [B, ...], [T, B, features])."""
        rows = jax.tree.map(lambda x: lax.collapse(x, 0, 2), obs)
        x = self.encoder(rows)
        x = x.reshape(*is_first.shape, x.shape[-1])
        return (carry, x) if self.core is None else self.core.unroll(carry, x, is_first)
