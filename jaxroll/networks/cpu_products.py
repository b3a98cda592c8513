"""Products that XLA computes slowly on a CPU, in the form that is fast there.

Everywhere else they are the plain product and the plain convolution: `lax.platform_dependent`
chooses when the program is lowered, and only the chosen form is in it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """rows @ kernel, [N, in] and [in, features].

    On a CPU the kernel's gradient, rowsᵀ times the cotangent, is slow unless the rows are
    transposed beforehand: PPO's update takes 1.1–1.27 times as long without this.
    """
    return rows @ kernel


@product.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (rows, kernel), (rows_dot, kernel_dot) = primals, tangents
    # The barrier keeps the transpose out of the product.
    columns = lax.platform_dependent(
        rows, cpu=lambda x: lax.optimization_barrier(x.T), default=jnp.transpose
    )
    change = lax.dot_general(columns, kernel_dot, (((0,), (0,)), ((), ())))
    return rows @ kernel, rows_dot @ kernel + change


def convolution(image: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution of small images, stride 1, no padding.

    On a CPU it is one product over all patches: the gradient of XLA's convolution of a 10 × 10
    image takes many times as long.

    Args:
      image: [N, H, W, C].
      kernel: [size, size, C, features].

    Returns:
      [N, H − size + 1, W − size + 1, features].
    """
    return lax.platform_dependent(image, kernel, cpu=_patch_product, default=_convolution)


def _convolution(image: jax.Array, kernel: jax.Array) -> jax.Array:
    axes = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=axes)


def _patch_product(image: jax.Array, kernel: jax.Array) -> jax.Array:
    size, _, _, features = kernel.shape
    height, width = (side - size + 1 for side in image.shape[1:3])
    corners = [(i, j) for i in range(size) for j in range(size)]
    patches = jnp.concatenate([image[:, i : i + height, j : j + width] for i, j in corners], -1)
    rows = patches.reshape(-1, patches.shape[-1])
    return product(rows, kernel.reshape(-1, features)).reshape(-1, height, width, features)
