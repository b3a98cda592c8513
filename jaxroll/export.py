"""A trained policy as a file that runs with JAX alone, without jaxroll and without flax."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from jaxroll.distributions import sample
from jaxroll.parallel import local
from jaxroll.spaces import zeros


def export_policy(
    agent: Any,
    state: Any,
    path: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    deterministic: bool = True,
    platforms: tuple[str, ...] = ("cpu", "cuda", "tpu"),
) -> Path:
    """Write the policy of a state, its params included, as a serialised `jax.export.Exported`.

    To run it:

        policy = jax.export.deserialize(pathlib.Path("policy.bin").read_bytes())
        actions = policy.call(obs)                          # feed-forward
        actions, carry = policy.call(obs, carry, is_first)  # recurrent

    A recurrent policy's carry is a tuple of arrays; where `is_first` is True it restarts, so zeros
    will do at first: `policy.in_avals` has their shapes. A policy that samples takes one
    argument more, at the end: a uint32 seed, another one for each call.

    Args:
      agent: a DistributedAgent.
      state: its TrainState.
      path: the file to write.
      batch_size: of the observations [B, ...]; None: any.
      deterministic: the distribution's mode; False: a sample.
      platforms: where it will run.

    Returns:
      the path.

    Example:
      >>> import tempfile, jaxroll
      >>> ppo = jaxroll.PPO.create("CartPole-v1", num_envs=4, num_steps=8)
      >>> state = jax.jit(ppo.init)(jax.random.key(0))
      >>> path = export_policy(ppo, state, tempfile.mkdtemp() + "/policy.bin", platforms=("cpu",))
      >>> export.deserialize(bytearray(path.read_bytes())).call(jnp.zeros((3, 4))).shape
      (3,)
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(
            'export needs flatbuffers. Install it with: pip install "jaxroll[export]".'
        )
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, or None for any, got {batch_size}.")
    params = local(agent.acting_params(state.learner))
    policy, space = agent.policy, agent.env.observation_space
    batch = export.symbolic_shape("b")[0] if batch_size is None else batch_size
    like = jax.eval_shape(lambda: policy.initial_carry(2))
    structure = jax.tree.structure(like)
    recurrent = structure.num_leaves > 0

    def batched(example: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *example.shape[1:]), example.dtype)

    def row(obs: Any, carry: Any, is_first: Any, key: Any) -> tuple[Any, Any]:
        """One observation: a policy may look at the size of its batch, and B is not known here."""
        one = jax.tree.map(lambda x: x[None], (carry, obs, is_first))
        carry, output = policy.apply(params, *one)
        distribution = output.distribution
        action = distribution.mode() if deterministic else sample(distribution, key)
        return jax.tree.map(lambda x: x[0], (action, carry))

    def rows(obs: Any, carry: Any, is_first: Any, seed: tuple[Any, ...]) -> tuple[Any, Any]:
        key = jax.random.key(*(seed or (0,)))
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(is_first.shape[0]))
        return jax.vmap(row)(obs, carry, is_first, keys)

    def feed_forward(obs: Any, *seed: Any) -> Any:
        count = jax.tree.leaves(obs)[0].shape[0]
        carry = jax.tree.unflatten(structure, [])
        return rows(obs, carry, jnp.zeros((count,), bool), seed)[0]

    def with_carry(obs: Any, carry: tuple[Any, ...], is_first: Any, *seed: Any) -> Any:
        action, carry = rows(obs, jax.tree.unflatten(structure, carry), is_first, seed)
        return action, tuple(jax.tree.leaves(carry))

    args: list[Any] = [jax.tree.map(batched, zeros(space, (1,)))]
    if recurrent:
        args += [tuple(map(batched, jax.tree.leaves(like))), jax.ShapeDtypeStruct((batch,), bool)]
    if not deterministic:
        args.append(jax.ShapeDtypeStruct((), jnp.uint32))
    program = jax.jit(with_carry if recurrent else feed_forward)
    data = export.export(program, platforms=platforms)(*args).serialize()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)
    return path
