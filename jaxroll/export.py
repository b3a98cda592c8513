"""A trained policy as a file that runs with JAX alone, without jaxroll and without flax.

Such a file is a program: whoever runs it trusts whoever wrote it. JAX reads it with parsers that a
crafted file can crash or keep busy for ever, so `load_policy` compares the digest first: that of a
second file beside it or, where that could have been changed too, one given by hand. Of custom calls
(native functions called by name) only those that JAX itself makes are let through.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from jaxroll.checks import check_count, check_flag, check_path
from jaxroll.distributions import sample
from jaxroll.parallel import local
from jaxroll.spaces import zeros

# Custom calls of JAX's own lowering: shardings, random bits, linear algebra.
_CUSTOM_CALLS = re.compile(
    r"Sharding|SPMD\w+|shape_assertion|annotate_device_placement|stablehlo\.dynamic_\w+|ApproxTopK"
    r"|Eigh|Qr|LuDecomposition|ProductOfElementaryHouseholderReflectors"
    r"|(cu|hip)_(threefry2x32_ffi|lu_pivots_to_permutation)"
    r"|(lapack|cusolver|hipsolver|cusparse)_\w+_ffi"
)
_CALLED = re.compile(r'custom_call\s*@"?([^\s"(]+)|call_target_name = "([^"]*)"')


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

    Its digest is written beside it, as path + ".sha256", for `load_policy` and `sha256sum --check`.
    To run it:

        policy = jaxroll.load_policy("policy.bin")
        # Without jaxroll, and only a file that you wrote:
        policy = jax.export.deserialize(bytearray(pathlib.Path("policy.bin").read_bytes()))
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
      >>> load_policy(path).call(jnp.zeros((3, 4))).shape
      (3,)
    """
    _need_flatbuffers()
    if not hasattr(agent, "acting_params"):
        raise TypeError(f"agent must be an agent, such as jaxroll.PPO.create(...), got {agent!r}.")
    if not hasattr(state, "learner"):
        raise TypeError(f"state must be the agent's TrainState, got {state!r}.")
    path, deterministic = check_path("path", path), check_flag("deterministic", deterministic)
    if batch_size is not None:
        batch_size = check_count("batch_size", batch_size)
    params = local(agent.acting_params(state.learner))
    policy, space = agent.policy, agent.env.observation_space
    batch = export.symbolic_shape("b")[0] if batch_size is None else batch_size
    carry_like, structure = jax.tree.flatten(jax.eval_shape(lambda: policy.initial_carry(2)))

    def act_on_one(obs: Any, carry: Any, is_first: Any, key: jax.Array) -> tuple[Any, Any]:
        """One observation: a policy may look at the size of its batch, and B is not known here."""
        one = jax.tree.map(lambda x: x[None], (carry, obs, is_first))
        carry, output = policy.apply(params, *one)
        distribution = output.distribution
        action = distribution.mode() if deterministic else sample(distribution, key)
        return jax.tree.map(lambda x: x[0], (action, carry))

    def act(obs: Any, *rest: Any) -> Any:
        """`rest` is (carry, is_first) of a recurrent policy, then the seed of one that samples."""
        count = jax.tree.leaves(obs)[0].shape[0]
        carry, is_first = rest[:2] if carry_like else ((), jnp.zeros((count,), bool))
        key = jax.random.key(0 if deterministic else rest[-1])
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))
        carry = jax.tree.unflatten(structure, carry)
        action, carry = jax.vmap(act_on_one)(obs, carry, is_first, keys)
        return (action, tuple(jax.tree.leaves(carry))) if carry_like else action

    def batched(example: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *example.shape[1:]), example.dtype)

    args: list[Any] = [jax.tree.map(batched, zeros(space, (1,)))]
    if carry_like:
        args += [tuple(map(batched, carry_like)), jax.ShapeDtypeStruct((batch,), bool)]
    if not deterministic:
        args.append(jax.ShapeDtypeStruct((), jnp.uint32))
    data = export.export(jax.jit(act), platforms=platforms)(*args).serialize()
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = f"{hashlib.sha256(data).hexdigest()}  {path.name}\n"
    for file, content in ((_digest_file(path), digest.encode()), (path, data)):
        temporary = file.with_name(file.name + ".tmp")
        temporary.write_bytes(content)
        os.replace(temporary, file)
    return path


def load_policy(path: str | os.PathLike[str], *, sha256: str | None = None) -> export.Exported:
    """What `export_policy` wrote, after its digest and its custom calls were checked.

    Running it is running a program: load only what you, or someone you trust, wrote.

    Args:
      path: the file.
      sha256: its digest in hexadecimal, from where nobody else can change it; None: that in the
        file beside it, which tells of damage, not of whoever can write both.

    Returns:
      a `jax.export.Exported`; see `export_policy` for how to call it.

    Example:
      >>> load_policy("policy.bin")
      Traceback (most recent call last):
        ...
      FileNotFoundError: policy.bin does not exist.
    """
    _need_flatbuffers()
    path = check_path("path", path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    beside = _digest_file(path)
    if sha256 is not None:
        if not isinstance(sha256, str) or not re.fullmatch("[0-9a-fA-F]{64}", sha256):
            raise ValueError(f"sha256 must be 64 hexadecimal digits, got {sha256!r}.")
        wanted = sha256.lower()
    elif beside.exists():
        wanted = (beside.read_text("ascii", "replace").split() or [""])[0]
    else:
        raise FileNotFoundError(
            f"{beside} is missing: it has the digest of {path.name}. Copy both files, or give "
            "load_policy(path, sha256=…) if you know the digest."
        )
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != wanted:
        raise ValueError(
            f"{path} is damaged, or not what was exported: its SHA-256 is {found}, not {wanted}."
        )
    try:
        exported = export.deserialize(bytearray(data))
        text = exported.mlir_module()
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is not an exported policy: {reason}") from error
    called = {"".join(names) for names in _CALLED.findall(text)}
    strange = sorted(name for name in called if not _CUSTOM_CALLS.fullmatch(name))
    if strange:
        raise ValueError(
            f"{path} makes custom calls that are not JAX's own, {', '.join(strange)}: it was not "
            "written by export_policy, and could run any code."
        )
    return exported


def _digest_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _need_flatbuffers() -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(
            'export needs flatbuffers. Install it with: pip install "jaxroll[export]".'
        )
