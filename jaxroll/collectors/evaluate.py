"""Evaluation: N whole episodes of a policy, none favoured for being short.

Counting the first N ends over many environments would favour short episodes. Here every episode
has its place before it starts: environment i plays episodes i, i + B, i + 2B, … below N, one
after the other, and whatever it would play after them is not counted. The loop ends when all have
been played, or after `max_steps`; then what is unfinished is reported as such.

Nothing is learned here: params, and with them normalisers' statistics, are read only.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxroll.checks import check_arrays, check_count, check_flag, check_key
from jaxroll.collectors.rollout import keep_types, strong_types
from jaxroll.distributions import sample
from jaxroll.envs.base import Env, HostEnv, HostEnvSpec
from jaxroll.envs.make import as_device_env, as_env
from jaxroll.networks import Policy, as_policy
from jaxroll.types import Array, Node, PyTree

MAX_STEPS_PER_EPISODE = 100_000
STEPS_PER_TURN = 16
MAX_NUM_ENVS = 128


class EvaluationResult(Node):
    """N episodes, in the order in which they were assigned.

    Example:
      >>> result = EvaluationResult(episode_return=np.array([3.0, 5.0, 1.0]),
      ...                           episode_length=np.array([30, 50, 10]),
      ...                           is_complete=np.array([True, True, False]))
      >>> float(result.mean_return), int(result.num_unfinished)
      (4.0, 1)
    """

    episode_return: Array  # [N] float32; so far, where not complete
    episode_length: Array  # [N] int32
    is_complete: Array  # [N] bool: False where max_steps came before the end

    @property
    def num_unfinished(self) -> Array:
        """[] how many of the N episodes did not end."""
        return (~self.is_complete).sum()

    @property
    def mean_return(self) -> Array:
        """[] over the complete episodes; NaN if there is none."""
        return self._mean(self.episode_return)

    @property
    def mean_length(self) -> Array:
        """[] over the complete episodes; NaN if there is none."""
        return self._mean(self.episode_length)

    def _mean(self, x: Array) -> Array:
        count = self.is_complete.sum()
        mean = (x * self.is_complete).sum() / jnp.maximum(count, 1)
        return jnp.where(count > 0, mean, jnp.nan)


def evaluate(
    env: Any,
    policy: Any,
    params: PyTree,
    key: jax.Array,
    *,
    num_episodes: int,
    num_envs: int | None = None,
    deterministic: bool = True,
    max_steps: int | None = None,
    mesh: Mesh | None = None,
) -> EvaluationResult:
    """Play N whole episodes of a JAX environment: one compiled program, however long they are.

    Args:
      env: an `Env`; hashable, as is the policy, so that one compilation serves every call.
      policy: a `Policy`.
      params: of the policy.
      key: drawn from for resets, steps and (if not deterministic) actions.
      num_episodes: N.
      num_envs: B, how many run side by side; None: N, at most 128.
      deterministic: take the mode of the distribution instead of a sample.
      max_steps: how many steps one environment may take for all its episodes, so that an
        endless one does not hang; None: 100,000 for each of its episodes.
      mesh: of one axis, over which the environments are spread; None: one device. No device waits
        for another; each environment has the same keys as on one device.

    Returns:
      `EvaluationResult`; check `num_unfinished` where episodes may be endless.

    Example:
      >>> from jaxroll.envs import make_env
      >>> from jaxroll.networks import make_policy
      >>> env = make_env("CartPole-v1")
      >>> policy = make_policy(env.observation_space, env.action_space)
      >>> params = policy.init(jax.random.key(0), jnp.zeros((1, 4)))
      >>> evaluate(env, policy, params, jax.random.key(1), num_episodes=5).episode_return.shape
      (5,)
    """
    env, policy = as_device_env(env, "evaluate_host"), as_policy(policy)
    _check(params, key, deterministic)
    num_envs, quota, limit = _plan(num_episodes, num_envs, max_steps)
    played = _play_all(
        env,
        policy,
        params,
        key,
        limit,
        num_episodes=int(num_episodes),
        num_envs=num_envs,
        deterministic=bool(deterministic),
        mesh=mesh,
    )
    if mesh is not None and not isinstance(key, jax.core.Tracer):
        # Joined on the host: on the devices, all would wait for the slowest in a collective, and
        # CPU devices give up after 40 seconds.
        played = jax.device_get(played)
    return _result(played, quota)


class _Played(NamedTuple):
    """Round r of environment b is the r-th episode that it plays."""

    returns: Array  # [R, B]
    lengths: Array  # [R, B]
    episodes: Array  # [B] how many the environment has finished


@partial(
    jax.jit,
    static_argnames=("env", "policy", "num_episodes", "num_envs", "deterministic", "mesh"),
)
def _play_all(
    env: Env,
    policy: Policy,
    params: PyTree,
    key: jax.Array,
    limit: Array | int,  # steps that each environment may take
    *,
    num_episodes: int,
    num_envs: int,
    deterministic: bool,
    mesh: Mesh | None,
) -> _Played:
    """What all environments played, B padded to the mesh's size."""
    index, quota = np.arange(num_envs), _quota(num_episodes, num_envs)
    rounds = int(quota.max())

    def play(params: PyTree, key: jax.Array, limit: Array, index: Array, quota: Array) -> _Played:
        """The environments of one device: [B] which of all they are, [B] their quotas."""
        reset_key, step_key = jax.random.split(key)
        reset_keys = jax.random.split(reset_key, num_envs)[index]
        env_state, obs = strong_types(jax.vmap(env.reset)(reset_keys))

        def is_unfinished(state: tuple) -> Array:
            t, _, _, played = state
            return jnp.any(played.episodes < quota) & (t < limit)

        def step(state: tuple, _: None) -> tuple[tuple, None]:
            t, env_state, seen, (returns, lengths, episodes) = state
            live = t < limit
            env_key, action_key = jax.random.split(jax.random.fold_in(step_key, t))
            # Devices that play side by side need noise of their own.
            fold = None if mesh is None else index[0]
            carry, action = _act(policy, deterministic, params, seen, action_key, fold)
            env_keys = jax.random.split(env_key, num_envs)[index]
            after, step = jax.vmap(env.step)(env_keys, env_state, action)
            done = (step.terminated.astype(bool) | step.truncated.astype(bool)) & live
            # Past its quota an environment writes to a row that is cut off or does not exist.
            at = (episodes, jnp.arange(len(index)))
            reward = jnp.where(live, step.reward.astype(jnp.float32), 0.0)
            played = _Played(
                returns.at[at].add(reward, mode="drop"),
                lengths.at[at].add(live.astype(jnp.int32), mode="drop"),
                jnp.minimum(episodes + done.astype(jnp.int32), quota),
            )
            env_state = keep_types(after, env_state, "the environment's state")
            carry = keep_types(carry, seen[0], "the policy's carry")
            obs = keep_types(step.obs, seen[1], "the observation")
            return (t + 1, env_state, (carry, obs, done), played), None

        # Whether to go on is asked of the host on a GPU: once in some steps, not at each. Steps
        # past the last episode or the limit count for nothing.
        turn = partial(lax.scan, step, length=STEPS_PER_TURN)
        carry = strong_types(policy.initial_carry(len(index)))
        lengths = jnp.zeros((rounds, len(index)), jnp.int32)
        played = _Played(lengths.astype(jnp.float32), lengths, lengths[0])
        seen = (carry, obs, jnp.ones(len(index), bool))
        state = (jnp.zeros((), jnp.int32), env_state, seen, played)
        return lax.while_loop(is_unfinished, lambda state: turn(state)[0], state)[-1]

    if mesh is not None:
        (axis,) = mesh.axis_names
        padding = (0, -num_envs % mesh.size)
        index, quota = np.pad(index, padding, "edge"), np.pad(quota, padding)
        spread, columns, whole = PartitionSpec(axis), PartitionSpec(None, axis), PartitionSpec()
        play = jax.shard_map(
            play,
            mesh=mesh,
            in_specs=(whole, whole, whole, spread, spread),
            out_specs=_Played(columns, columns, spread),
            check_vma=False,
        )
    return play(params, key, *(jnp.asarray(x) for x in (limit, index, quota)))


def evaluate_host(
    env: HostEnv | HostEnvSpec,
    policy: Any,
    params: PyTree,
    key: jax.Array,
    *,
    num_episodes: int,
    num_envs: int | None = None,
    deterministic: bool = True,
    max_steps: int | None = None,
) -> EvaluationResult:
    """Play N whole episodes of host environments: a loop with a jitted policy step.

    Args:
      env: open environments, which are reset and stay open, or the spec of some, which are
        opened and closed here.
      policy, params, num_episodes, deterministic, max_steps: as for `evaluate`.
      key: drawn from for the environments' seed and (if not deterministic) actions.
      num_envs: how many to open of a spec; None: N, at most 128. Open environments are as many
        as they are.

    Returns:
      `EvaluationResult` with numpy arrays.

    Example:
      >>> from jaxroll.envs import make_env
      >>> from jaxroll.networks import make_policy
      >>> spec = make_env("gymnasium:CartPole-v1")
      >>> policy = make_policy(spec.observation_space, spec.action_space)
      >>> params = policy.init(jax.random.key(0), jnp.zeros((1, 4)))
      >>> result = evaluate_host(spec, policy, params, jax.random.key(1), num_episodes=3)
      >>> result.episode_length.shape, int(result.num_unfinished)
      ((3,), 0)
    """
    env, policy = as_env(env), as_policy(policy)
    _check(params, key, deterministic)
    if isinstance(env, HostEnvSpec):
        options = {"deterministic": deterministic, "max_steps": max_steps}
        with env.make(_plan(num_episodes, num_envs, max_steps)[0]) as opened:
            return evaluate_host(opened, policy, params, key, num_episodes=num_episodes, **options)
    if num_envs not in (None, env.num_envs):
        raise ValueError(
            f"num_envs must be that of the open environments, {env.num_envs}, got {num_envs}. "
            "Leave it out, or give the spec instead of open environments."
        )
    num_envs, quota, limit = _plan(num_episodes, env.num_envs, max_steps)
    reset_key, step_key = jax.random.split(key)
    obs = env.reset(int(jax.random.bits(reset_key)) >> 1)
    carry = policy.initial_carry(num_envs)
    is_first = np.ones(num_envs, bool)
    returns = np.zeros((quota.max(), num_envs), np.float32)
    lengths, episodes = np.zeros_like(returns, np.int32), np.zeros_like(quota)
    t = 0
    while (episodes < quota).any() and t < limit:
        seen = carry, obs, is_first
        carry, action = _jitted_act(policy, deterministic, params, seen, step_key, np.int32(t))
        step = env.step(jax.tree.map(np.asarray, action))
        # A row that only resets belongs to no episode.
        (counted,) = np.nonzero((episodes < quota) & step.valid)
        returns[episodes[counted], counted] += step.reward[counted]
        lengths[episodes[counted], counted] += 1
        episodes[counted] += (step.terminated | step.truncated)[counted]
        obs, is_first, t = step.obs, step.is_first, t + 1
    return _result(_Played(returns, lengths, episodes), quota)


def _check(params: PyTree, key: jax.Array, deterministic: bool) -> None:
    check_arrays("params", params)
    check_key("key", key)
    check_flag("deterministic", deterministic)


def _plan(
    num_episodes: int, num_envs: int | None, max_steps: int | None
) -> tuple[int, np.ndarray, int]:
    """(B, [B] how many episodes each environment plays, how many steps each may take)."""
    num_episodes = check_count("num_episodes", num_episodes)
    if num_envs is None:
        num_envs = min(num_episodes, MAX_NUM_ENVS)
    num_envs = check_count("num_envs", num_envs)
    quota = _quota(num_episodes, num_envs)
    if max_steps is None:
        max_steps = min(int(quota.max()) * MAX_STEPS_PER_EPISODE, 2**31 - 1)
    return num_envs, quota, check_count("max_steps", max_steps)


def _quota(num_episodes: int, num_envs: int) -> np.ndarray:
    """[B] how many episodes each environment plays."""
    first = np.arange(num_envs)
    return np.maximum(-(-(num_episodes - first) // num_envs), 0).astype(np.int32)


def _result(played: _Played, quota: np.ndarray) -> EvaluationResult:
    """The first N episodes, round by round; columns that pad the mesh are left out."""
    is_complete = np.arange(len(played.returns))[:, None] < played.episodes[None]
    rows = (played.returns, played.lengths, is_complete)
    return EvaluationResult(*(x[:, : len(quota)].reshape(-1)[: quota.sum()] for x in rows))


def _act(
    policy: Policy, deterministic: bool, params: PyTree, seen: tuple, key: jax.Array, fold: Any
) -> tuple[PyTree, PyTree]:
    """(carry, actions) from what was seen: carry, observations and is_first."""
    carry, output = policy.apply(params, *seen)
    if deterministic:
        return carry, output.distribution.mode()
    key = key if fold is None else jax.random.fold_in(key, fold)
    return carry, sample(output.distribution, key)


_jitted_act = jax.jit(_act, static_argnums=(0, 1))
