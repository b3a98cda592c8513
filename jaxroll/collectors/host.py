"""Collection from host environments: a loop with one jitted policy step.

`HostCollector` returns what `collect` returns for JAX environments: the next `ActorState` and a
`Rollout`. Each step moves the observations to the device and the actions back, nothing else: what
the policy saw and gave is written into buffers on the device, in place. Host environments cannot be
copied or set back, so `ActorState.env` is only the number of steps they have taken, by which an
outdated state is noticed.

A truncated step bootstraps from V(final observation) under the policy's own carry. Where the
environments reset on the next step, the final observation is the next row's own, so its value is
there already; where they reset on the same step, the final observations of truncated steps are
valued after the loop, B at a time.

The loop waits for an action at every step, so a step computes no more than it must: the noise of
a rollout is drawn before, and the values of a feed-forward policy whose critic is a network of its
own are left to after.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.checks import check_count, check_divides, check_flag
from jaxroll.collectors.batched import (
    action_draws,
    take_action,
    values_after,
    values_together,
)
from jaxroll.collectors.episodes import count_episodes
from jaxroll.collectors.rollout import RESET_FOLD
from jaxroll.envs.base import HostEnv, HostStep, empty_step
from jaxroll.envs.check import check_host_reset, check_host_step
from jaxroll.networks import as_policy
from jaxroll.types import (
    ActorState,
    Array,
    EpisodeStatistics,
    FinalRows,
    PyTree,
    Rollout,
    Transition,
)


class HostCollector:
    """Drives B host environments with a policy.

    Args:
      envs: a `HostEnv`, for instance `make_env("gymnasium:CartPole-v1").make(64)`.
      policy: a `Policy`; if it has `act_extras(params, output, action)`, that is stored as
        `extras`, otherwise the `extras` of its output.
      sequence_length: L, for learners that train on sequences: the carry before steps
        0, L, 2L, … is kept; None: the rollout's length.
      max_truncations: S, how many final observations of truncated steps `Rollout.final` holds
        for each environment; None: 1 (without `bootstrap`, T). All truncated steps bootstrap from
        V(final observation), whatever S is.
      bootstrap: whether to value the final observations. If False the learner does so itself
        (from `Rollout.final`) and `bootstrap_value` is V(obs) at truncated steps.
      deterministic: take the mode of the distribution instead of a sample.

    Example:
      >>> import jaxroll.networks
      >>> from jaxroll.envs import make_env
      >>> envs = make_env("gymnasium:CartPole-v1").make(4)
      >>> policy = jaxroll.networks.make_policy(envs.observation_space, envs.action_space)
      >>> collector = HostCollector(envs, policy)
      >>> actor = collector.init(jax.random.key(0))
      >>> params = policy.init(jax.random.key(1), actor.obs)
      >>> actor, rollout = collector.collect(params, actor, num_steps=16)
      >>> rollout.transition.obs.shape, rollout.last_value.shape
      ((16, 4, 4), (4,))
      >>> envs.close()
    """

    def __init__(
        self,
        envs: HostEnv,
        policy: Any,
        *,
        sequence_length: int | None = None,
        max_truncations: int | None = None,
        bootstrap: bool = True,
        deterministic: bool = False,
    ):
        if not isinstance(envs, HostEnv):
            raise TypeError(
                f"HostCollector needs open environments, a HostEnv, got {type(envs).__name__}. "
                "Open them: spec.make(num_envs); for a JAX environment use collect."
            )
        if max_truncations is not None:
            check_count("max_truncations", max_truncations, at_least=0)
        if sequence_length is not None:
            check_count("sequence_length", sequence_length)
        self.envs, self.policy = envs, as_policy(policy)
        self._sequence_length, self._max_truncations = sequence_length, max_truncations
        self._bootstrap = check_flag("bootstrap", bootstrap)
        self._programs = _programs(self.policy, check_flag("deterministic", deterministic))
        self._steps_taken = -1  # not reset yet

    def init(self, key: jax.Array) -> ActorState:
        """Reset the environments, with seeds from the key: the actor's first state, [B, ...]."""
        return self._start(key, np.int32(0))

    def restart(self, actor: ActorState) -> ActorState:
        """Reset the environments and go on with the actor's key: after restoring a checkpoint.

        The episodes that ran are cut: no step of theirs is marked as an end, and the statistics
        of the new ones begin at 0.
        """
        return self._start(actor.key, actor.num_rollouts)

    def rehearse(self, params: PyTree, actor: ActorState, num_steps: int) -> Rollout:
        """A rollout that touches no environment: all that `collect` needs is compiled by it."""
        envs, calls = self.envs, itertools.count()
        empty = empty_step(envs)

        def step(actions: PyTree) -> HostStep:
            """Nothing happens, but the first step truncates, so that this is compiled too."""
            cut = np.full(envs.num_envs, next(calls) == 0)
            final_obs = None if envs.resets_on_next_step else empty.final_obs
            return empty._replace(truncated=cut, final_obs=final_obs, valid=~empty.valid)

        other = copy.copy(self)
        other.envs = types.SimpleNamespace(
            num_envs=envs.num_envs,
            observation_space=envs.observation_space,
            resets_on_next_step=envs.resets_on_next_step,
            step=step,
        )
        other._steps_taken = int(actor.env)
        return other.collect(params, actor, num_steps)[1]

    def collect(
        self, params: PyTree, actor: ActorState, num_steps: int
    ) -> tuple[ActorState, Rollout]:
        """T steps of the environments, and the actor after them.

        Returns:
          (actor, rollout); see `jaxroll.types.Rollout` for the shapes. `bootstrap_value` is 0
          where a step was not truncated, or was terminated as well; `valid` is there only if
          the environments reset on the next step.
        """
        num_steps = check_count("num_steps", num_steps)
        length = self._sequence_length or num_steps
        check_divides("sequence_length", length, num_steps, "num_steps")
        self._check_actor(actor)
        envs, programs, carry = self.envs, self._programs, actor.carry
        together = values_after(self.policy, actor)
        draws, written, values = programs.begin(num_steps, together, params, actor)
        obs, is_first = actor.obs, np.empty((num_steps + 1, envs.num_envs), bool)
        is_first[0] = actor.is_first
        reward = np.empty((num_steps, envs.num_envs), np.float32)
        terminated, truncated, valid = (np.empty(reward.shape, bool) for _ in range(3))
        cuts, carries = [], []
        for t in range(num_steps):
            if t % length == 0:
                carries.append(carry)
            written, carry, action = programs.act(
                together, params, written, carry, obs, is_first[t], draws
            )
            step = envs.step(_copy(action))
            if t == self._steps_taken == 0:
                check_host_step(envs, step)
            obs = _copy(step.obs)  # the environments may write into theirs while the device reads
            is_first[t + 1], reward[t], valid[t] = step.is_first, step.reward, step.valid
            terminated[t], truncated[t] = step.terminated, step.truncated
            if step.truncated.any():
                cut = np.flatnonzero(step.truncated & ~step.terminated)
                final_obs = step.obs if step.final_obs is None else step.final_obs
                seen = jax.tree.map(lambda x, cut=cut: np.asarray(x)[cut], (carry, final_obs))
                cuts.append(_Cut(t, cut, seen))
        self._steps_taken += num_steps

        _, rows = written
        if self._bootstrap and not envs.resets_on_next_step and jax.tree.leaves(values):
            rows["bootstrap_value"] = _final_values(programs.value, params, cuts, values)
        final = self._final_rows(cuts, (carry, actor.obs), num_steps)
        after = actor.replace(obs=obs, carry=carry, env=np.int32(self._steps_taken))
        return programs.finish(
            self._bootstrap,
            envs.resets_on_next_step,
            together,
            params,
            after,
            _Steps(is_first, reward, terminated, truncated, valid),
            rows,
            final,
            tuple(carries),
        )

    def _start(self, key: jax.Array, num_rollouts: Array) -> ActorState:
        reset_key = jax.random.fold_in(jax.random.fold_in(key, RESET_FOLD), num_rollouts)
        obs = self.envs.reset(int(jax.random.randint(reset_key, (), 0, 2**30)))
        check_host_reset(self.envs, obs)
        self._steps_taken = 0
        num_envs = self.envs.num_envs
        return ActorState(
            env=jnp.zeros((), jnp.int32),
            obs=jax.device_put(jax.tree.map(np.ascontiguousarray, obs), may_alias=False),
            carry=jax.tree.map(jnp.asarray, self.policy.initial_carry(num_envs)),
            is_first=jnp.ones(num_envs, bool),
            key=key,
            num_rollouts=jnp.asarray(num_rollouts, jnp.int32),
            statistics=EpisodeStatistics(
                episode_return=jnp.zeros(num_envs, jnp.float32),
                episode_length=jnp.zeros(num_envs, jnp.int32),
            ),
        )

    def _final_rows(self, cuts: list[_Cut], like: PyTree, num_steps: int) -> FinalRows:
        """The first S of each environment's truncated steps, in numpy."""
        num_rows, num_envs = self._max_truncations, self.envs.num_envs
        if num_rows is None:
            num_rows = 1 if self._bootstrap else num_steps
        buffers = jax.tree.map(lambda x: np.zeros((num_rows, *x.shape), x.dtype), like)
        step = np.full((num_rows, num_envs), num_steps, np.int32)
        written = np.zeros(num_envs, np.int64)
        for cut in cuts:
            kept = written[cut.envs] < num_rows
            index = written[cut.envs[kept]], cut.envs[kept]
            step[index] = cut.step
            for buffer, x in zip(jax.tree.leaves(buffers), jax.tree.leaves(cut.seen)):
                buffer[index] = x[kept]
            written[cut.envs] += 1
        carry, obs = buffers
        lost = 0 if self._bootstrap else np.maximum(written - num_rows, 0).sum()
        return FinalRows(obs=obs, carry=carry, step=step, overflow=np.int32(lost))

    def _check_actor(self, actor: ActorState) -> None:
        if int(actor.env) != self._steps_taken:
            has = "not been reset" if self._steps_taken < 0 else f"taken {self._steps_taken} steps"
            raise ValueError(
                f"The environments have {has}, but the actor state is from after "
                f"{int(actor.env)}: host environments cannot be set back. Use the state that the "
                "last collect returned, or reset them: actor = collector.restart(actor)."
            )


def _copy(tree: PyTree) -> PyTree:
    """Numpy arrays of its own; the common case, one array, is not taken apart at each step."""
    return np.array(tree) if hasattr(tree, "dtype") else jax.tree.map(np.array, tree)


class _Steps(NamedTuple):
    """What the environments gave beside observations; row T of is_first is what comes next."""

    is_first: Array  # [T + 1, B]
    reward: Array  # [T, B]
    terminated: Array  # [T, B]
    truncated: Array  # [T, B]
    valid: Array  # [T, B]


class _Cut(NamedTuple):
    """The environments that one step truncated, n of them."""

    step: int
    envs: np.ndarray  # [n]
    seen: PyTree  # [n, ...] (carry, final observation), with which to value them


def _final_values(value: Any, params: PyTree, cuts: list[_Cut], zero: PyTree) -> PyTree:
    """[T, B] V(final observation) where a step was cut, 0 elsewhere."""
    values = jax.tree.map(np.array, zero)
    if not cuts:
        return values
    num_envs = jax.tree.leaves(values)[0].shape[1]
    steps = np.concatenate([np.full(len(cut.envs), cut.step) for cut in cuts])
    envs = np.concatenate([cut.envs for cut in cuts])
    seen = jax.tree.map(lambda *x: np.concatenate(x), *(cut.seen for cut in cuts))
    for start in range(0, len(steps), num_envs):
        # B rows at a time, the last ones repeated, so that one program serves any number.
        rows = np.minimum(np.arange(start, start + num_envs), len(steps) - 1)
        carry, obs = jax.tree.map(lambda x, rows=rows: x[rows], seen)
        found = value(params, carry, obs, np.zeros(num_envs, bool))
        for stream, v in zip(jax.tree.leaves(values), jax.tree.leaves(found)):
            stream[steps[rows], envs[rows]] = v
    return values


class _Programs(NamedTuple):
    begin: Any  # -> (draws [T, ...], what `act` writes into, values of zero [T, B])
    act: Any  # one step: (what was written, carry, action)
    value: Any
    finish: Any  # the actor and the rollout from all that was written


@functools.lru_cache(maxsize=128)
def _programs(policy: Any, deterministic: bool) -> _Programs:
    """Jitted once for all collectors with an equal policy."""
    act_extras = getattr(policy, "act_extras", None)

    def one_step(leaves_value, params, carry, obs, is_first, draw):
        carry, output = policy.apply(params, carry, obs, is_first)
        action = take_action(output.distribution, draw, deterministic)
        row = {
            "obs": obs,
            "action": action,
            "log_prob": output.distribution.log_prob(action),
            "extras": act_extras(params, output, action) if act_extras else output.extras,
        }
        return carry, row if leaves_value else {**row, "value": output.value}

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def begin(num_steps, leaves_value, params, actor):
        def empty(tree):
            return jax.tree.map(lambda x: jnp.zeros((num_steps, *x.shape), x.dtype), tree)

        key = jax.random.fold_in(actor.key, actor.num_rollouts)
        draws = action_draws(policy, params, actor, key, num_steps, deterministic)
        draw = jax.tree.map(lambda x: x[0], draws)
        seen = params, actor.carry, actor.obs, actor.is_first
        _, row = jax.eval_shape(functools.partial(one_step, leaves_value), *seen, draw)
        written = jnp.zeros((), jnp.int32), empty(row)
        return draws, written, empty(jax.eval_shape(policy.value, *seen))

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def act(leaves_value, params, written, carry, obs, is_first, draws):
        t, rows = written
        draw = jax.tree.map(lambda x: x[t], draws)
        carry, row = one_step(leaves_value, params, carry, obs, is_first, draw)
        rows = jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, t, 0), rows, row
        )
        return (t + 1, rows), carry, row["action"]

    @functools.partial(jax.jit, static_argnums=(0, 1, 2))
    def finish(
        bootstrap, resets_on_next_step, together, params, actor, steps, rows, final, carries
    ):
        rows = {"bootstrap_value": None, "is_first": steps.is_first[:-1], **rows}
        if together:
            rows["value"] = values_together(policy, params, rows["obs"], rows["is_first"])
        actor = actor.replace(is_first=steps.is_first[-1])
        last_value = policy.value(params, actor.carry, actor.obs, actor.is_first)
        value, cut = rows["value"], steps.truncated & ~steps.terminated
        if not bootstrap:
            rows["bootstrap_value"] = jax.tree.map(lambda v: jnp.where(cut, v, 0), value)
        elif resets_on_next_step:
            rows["bootstrap_value"] = jax.tree.map(
                lambda v, last: jnp.where(cut, jnp.concatenate([v[1:], last[None]]), 0),
                value,
                last_value,
            )
        ends = steps.terminated | steps.truncated
        statistics, episodes = count_episodes(actor.statistics, steps.reward, ends, steps.valid)
        rollout = Rollout(
            transition=Transition(
                reward=steps.reward,
                terminated=steps.terminated,
                truncated=steps.truncated,
                valid=steps.valid if resets_on_next_step else None,
                **rows,
            ),
            last_obs=actor.obs,
            last_is_first=actor.is_first,
            last_carry=actor.carry,
            last_value=last_value,
            initial_carry=jax.tree.map(lambda *x: jnp.stack(x), *carries),
            final=final,
            episodes=episodes,
        )
        return actor.replace(num_rollouts=actor.num_rollouts + 1, statistics=statistics), rollout

    return _Programs(begin, act, jax.jit(policy.value), finish)
