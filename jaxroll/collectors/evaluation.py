"""Evaluation: N whole episodes of a policy, none favoured for being short.

Counting the first N ends over many environments would favour short episodes. Here every episode
has its place before it starts: environment i plays episodes i, i + B, i + 2B, … below N, one
after the other, and whatever it would play after them is not counted. The loop ends when all have
been played, or after `max_steps`; then what is unfinished is reported as such.

Nothing is learned here: params, and with them normalisers' moments, are read only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxroll.checks import check_flag
from jaxroll.collectors.rollout import keep_types, strong_types
from jaxroll.distributions import sample
from jaxroll.envs.base import HostEnv, HostEnvSpec
from jaxroll.envs.make import as_device_env, as_env
from jaxroll.networks import as_policy
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
    max_steps: Array | int | None = None,
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
    check_flag("deterministic", deterministic)
    returns, lengths, played = _play_all(
        env,
        policy,
        params,
        key,
        num_episodes=num_episodes,
        num_envs=num_envs,
        deterministic=deterministic,
        max_steps=max_steps,
        mesh=mesh,
    )
    if mesh is not None and not isinstance(returns, jax.core.Tracer):
        # Joined on the host: on the devices, all would wait for the slowest in a collective, and
        # CPU devices give up after 40 seconds.
        returns, lengths, played = jax.device_get((returns, lengths, played))
    is_complete = np.arange(len(returns))[:, None] < played[None]
    num_envs, _ = _plan(num_episodes, num_envs)
    return EvaluationResult(
        *(x[:, :num_envs].reshape(-1)[:num_episodes] for x in (returns, lengths, is_complete))
    )


@partial(
    jax.jit,
    static_argnames=("env", "policy", "num_episodes", "num_envs", "deterministic", "mesh"),
)
def _play_all(
    env: Any,
    policy: Any,
    params: PyTree,
    key: jax.Array,
    *,
    num_episodes: int,
    num_envs: int | None,
    deterministic: bool,
    max_steps: Array | int | None,
    mesh: Mesh | None,
) -> tuple[Array, Array, Array]:
    """([R, B] returns, [R, B] lengths, [B] episodes played), B padded to the mesh's size."""
    env, policy = as_device_env(env, "evaluate_host"), as_policy(policy)
    num_envs, quota = _plan(num_episodes, num_envs)
    rounds = int(quota.max())
    limit = rounds * MAX_STEPS_PER_EPISODE if max_steps is None else max_steps
    play = partial(_play, env, policy, num_envs, rounds, deterministic, mesh is not None)
    index = np.arange(num_envs)
    if mesh is not None:
        (axis,) = mesh.axis_names
        padding = (0, -num_envs % mesh.size)
        index, quota = np.pad(index, padding, "edge"), np.pad(quota, padding)
        spread, columns = PartitionSpec(axis), PartitionSpec(None, axis)
        play = jax.shard_map(
            play,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(), spread, spread),
            out_specs=(columns, columns, spread),
            check_vma=False,
        )
    return play(params, key, *(jnp.asarray(x) for x in (limit, index, quota)))


def _play(
    env: Any,
    policy: Any,
    num_envs: int,
    rounds: int,
    deterministic: bool,
    is_part: bool,
    params: PyTree,
    key: jax.Array,
    limit: Array,
    index: Array,
    quota: Array,
) -> tuple[Array, Array, Array]:
    """Play the episodes of these of `num_envs` environments.

    Args:
      env: an `Env`.
      policy: a `Policy`.
      num_envs: how many there are on all devices.
      rounds: R, the largest quota of any.
      deterministic: as for `evaluate`.
      is_part: whether other devices play too, and need noise of their own.
      params: of the policy.
      key: of the whole evaluation.
      limit: [] steps that each may take.
      index: [B] which they are.
      quota: [B] how many episodes each plays.

    Returns:
      ([R, B] returns, [R, B] lengths, [B] episodes played).
    """
    count = len(index)
    envs = jnp.arange(count)
    reset_key, step_key = jax.random.split(key)
    reset_keys = jax.random.split(reset_key, num_envs)[index]
    env_state, obs = strong_types(jax.vmap(env.reset)(reset_keys))

    def unfinished(state: _Play) -> Array:
        return jnp.any(state.episode < quota) & (state.t < limit)

    def step(state: _Play, _: None) -> tuple[_Play, None]:
        live = state.t < limit
        env_key, action_key = jax.random.split(jax.random.fold_in(step_key, state.t))
        action_key = jax.random.fold_in(action_key, index[0]) if is_part else action_key
        carry, action = _act(
            policy, deterministic, params, state.carry, state.obs, state.is_first, action_key
        )
        env_keys = jax.random.split(env_key, num_envs)[index]
        env_state, step = jax.vmap(env.step)(env_keys, state.env, action)
        done = (step.terminated.astype(bool) | step.truncated.astype(bool)) & live
        # Past its quota an environment writes to a row that is cut off below or does not exist.
        at = (state.episode, envs)
        reward = jnp.where(live, step.reward.astype(jnp.float32), 0.0)
        state = _Play(
            t=state.t + 1,
            env=keep_types(env_state, state.env, "the environment's state"),
            obs=keep_types(step.obs, state.obs, "the observation"),
            carry=keep_types(carry, state.carry, "the policy's carry"),
            is_first=done,
            episode=jnp.minimum(state.episode + done.astype(jnp.int32), quota),
            episode_return=state.episode_return.at[at].add(reward, mode="drop"),
            episode_length=state.episode_length.at[at].add(live.astype(jnp.int32), mode="drop"),
        )
        return state, None

    state = _Play(
        t=jnp.zeros((), jnp.int32),
        env=env_state,
        obs=obs,
        carry=strong_types(policy.initial_carry(count)),
        is_first=jnp.ones(count, bool),
        episode=jnp.zeros(count, jnp.int32),
        episode_return=jnp.zeros((rounds, count), jnp.float32),
        episode_length=jnp.zeros((rounds, count), jnp.int32),
    )
    # Whether to go on is asked of the host on a GPU: once in some steps, not at each. Steps past
    # the last episode or the limit count for nothing.
    state = lax.while_loop(unfinished, lambda s: lax.scan(step, s, length=STEPS_PER_TURN)[0], state)
    return state.episode_return, state.episode_length, state.episode


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
      policy: a hashable `Policy`.
      params: of the policy.
      key: drawn from for the environments' seed and (if not deterministic) actions.
      num_episodes: N.
      num_envs: how many to open of a spec; None: N, at most 128. Open environments are as many
        as they are.
      deterministic: take the mode of the distribution instead of a sample.
      max_steps: how many steps one environment may take for all its episodes; None: 100,000
        for each of its episodes.

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
    if isinstance(env, HostEnvSpec):
        with env.make(_plan(num_episodes, num_envs)[0]) as opened:
            return evaluate_host(
                opened,
                policy,
                params,
                key,
                num_episodes=num_episodes,
                deterministic=deterministic,
                max_steps=max_steps,
            )
    if num_envs not in (None, env.num_envs):
        raise ValueError(
            f"num_envs must be that of the open environments, {env.num_envs}, got {num_envs}. "
            "Leave it out, or give the spec instead of open environments."
        )
    num_envs, quota = _plan(num_episodes, env.num_envs)
    rounds = int(quota.max())
    limit = rounds * MAX_STEPS_PER_EPISODE if max_steps is None else max_steps
    reset_key, step_key = jax.random.split(key)
    obs = env.reset(int(jax.random.bits(reset_key)) >> 1)
    carry = policy.initial_carry(num_envs)
    is_first = np.ones(num_envs, bool)
    episode = np.zeros(num_envs, np.int32)
    returns = np.zeros((rounds, num_envs), np.float32)
    lengths = np.zeros((rounds, num_envs), np.int32)
    t = 0
    while (episode < quota).any() and t < limit:
        carry, action = _host_act(
            policy, deterministic, params, carry, obs, is_first, step_key, np.int32(t)
        )
        step = env.step(jax.tree.map(np.asarray, action))
        # A row that only resets belongs to no episode.
        (counted,) = np.nonzero((episode < quota) & step.valid)
        returns[episode[counted], counted] += step.reward[counted]
        lengths[episode[counted], counted] += 1
        episode[counted] += (step.terminated | step.truncated)[counted]
        obs, is_first, t = step.obs, step.is_first, t + 1
    is_complete = np.arange(rounds)[:, None] < episode[None]
    return EvaluationResult(
        episode_return=returns.reshape(-1)[:num_episodes],
        episode_length=lengths.reshape(-1)[:num_episodes],
        is_complete=is_complete.reshape(-1)[:num_episodes],
    )


class _Play(Node):
    """What the loop carries; Q is the largest quota."""

    t: Array
    env: PyTree
    obs: PyTree
    carry: PyTree
    is_first: Array
    episode: Array  # [B] how many the environment has finished
    episode_return: Array  # [Q, B]
    episode_length: Array  # [Q, B]


def _plan(num_episodes: int, num_envs: int | None) -> tuple[int, np.ndarray]:
    """(B, [B] how many episodes each environment plays)."""
    if num_episodes < 1:
        raise ValueError(f"num_episodes must be at least 1, got {num_episodes}.")
    if num_envs is None:
        num_envs = min(num_episodes, MAX_NUM_ENVS)
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}.")
    first = np.arange(num_envs)
    return num_envs, np.maximum(-(-(num_episodes - first) // num_envs), 0).astype(np.int32)


def _act(
    policy: Any,
    deterministic: bool,
    params: PyTree,
    carry: PyTree,
    obs: PyTree,
    is_first: Array,
    key: jax.Array,
) -> tuple[PyTree, PyTree]:
    carry, output = policy.apply(params, carry, obs, is_first)
    distribution = output.distribution
    return carry, distribution.mode() if deterministic else sample(distribution, key)


@partial(jax.jit, static_argnums=(0, 1))
def _host_act(
    policy: Any,
    deterministic: bool,
    params: PyTree,
    carry: PyTree,
    obs: PyTree,
    is_first: Array,
    key: jax.Array,
    t: Array,
) -> tuple[PyTree, PyTree]:
    key = jax.random.fold_in(key, t)
    return _act(policy, deterministic, params, carry, obs, is_first, key)
