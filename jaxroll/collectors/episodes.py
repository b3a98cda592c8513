"""Returns and lengths of the episodes in a rollout."""

from __future__ import annotations

import jax.numpy as jnp

from jaxroll.types import Array, EpisodeStatistics, EpisodeSums


def count_episodes(
    running: EpisodeStatistics, reward: Array, done: Array, valid: Array | None = None
) -> tuple[EpisodeStatistics, EpisodeSums]:
    """The episodes that run on after a rollout, and the sums over those that ended in it.

    The ended episodes of an environment are its steps up to the last end, and what it had before
    the rollout: sums over time, without a loop.

    Args:
      running: [B] the episodes that ran before the rollout.
      reward: [T, B].
      done: [T, B] terminated or truncated.
      valid: [T, B] which rows are experience; None: all.

    Example:
      >>> before = EpisodeStatistics(jnp.array([5.0]), jnp.array([2]))
      >>> reward, done = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[False], [True], [False]])
      >>> after, ended = count_episodes(before, reward, done)
      >>> float(ended.return_sum), int(ended.length_sum), after.episode_return.tolist()
      (8.0, 4, [3.0])
    """
    total, length = running.episode_return, running.episode_length
    counted = jnp.ones_like(done) if valid is None else valid
    done = done & counted
    step = jnp.arange(len(done), dtype=jnp.int32)[:, None]
    last_end = jnp.max(jnp.where(done, step, -1), axis=0)
    ended, has_ended = step <= last_end[None], last_end >= 0

    def split(before: Array, rows: Array) -> tuple[Array, Array]:
        """What belongs to ended episodes, over all environments, and what to the running ones."""
        rows = jnp.where(counted, rows, 0).astype(before.dtype)
        inside = jnp.sum(jnp.where(ended, rows, 0), axis=0, dtype=before.dtype)
        after = jnp.sum(jnp.where(ended, 0, rows), axis=0, dtype=before.dtype)
        ended_sum = jnp.sum(jnp.where(has_ended, before + inside, 0), dtype=jnp.float32)
        return ended_sum, jnp.where(has_ended, 0, before) + after

    return_sum, total = split(total, reward)
    length_sum, length = split(length, jnp.ones_like(done, length.dtype))
    count = jnp.sum(done, dtype=length.dtype)
    return EpisodeStatistics(total, length), EpisodeSums(count, return_sum, length_sum)
