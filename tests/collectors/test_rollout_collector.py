"""Rows equal a hand-stepped loop; truncated steps bootstrap from the final observation."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxroll import spaces
from jaxroll.collectors import collect, init_actor, rollout as rollout_module
from jaxroll.collectors.episodes import count_episodes
from jaxroll.distributions import Categorical
from jaxroll.envs import TimeLimit, Wrapper, autoreset, make_env, time_limit
from jaxroll.networks import make_policy
from jaxroll.networks.actor_critic import ActorCriticPolicy
from jaxroll.types import EpisodeStatistics, Node, PolicyOutput, TimeStep, Transition
from tests.tiers import plain

STATIC = ("env", "policy", "num_steps", "sequence_length", "max_truncations", "bootstrap",
          "deterministic")  # fmt: skip
run = jax.jit(collect, static_argnames=STATIC)


@dataclasses.dataclass(frozen=True)
class Script:
    """Episodes that end as a script says: the observation is (episode, step, start)."""

    terminated: tuple[int, ...] = (0, 0, 0, 1)
    truncated: tuple[int, ...] = (0, 0, 1, 0)
    random_start: bool = False
    observation_space = spaces.Box.create(-np.inf, np.inf, (3,))
    action_space = spaces.Discrete(3)

    def reset(self, key):
        start = jax.random.uniform(key) if self.random_start else jnp.float32(0)
        state = {"clock": 0, "episode": 0, "step": 0, "start": start}  # weak types on purpose
        return state, self._obs(state)

    def step(self, key, state, action):
        at = state["clock"] % len(self.terminated)
        terminated = jnp.array(self.terminated, bool)[at]
        truncated = jnp.array(self.truncated, bool)[at]
        done = terminated | truncated
        reward = 10.0 * state["episode"] + state["step"] + 0.5 * action
        ongoing = {**state, "clock": state["clock"] + 1, "step": state["step"] + 1}
        start = jax.random.uniform(key) if self.random_start else jnp.float32(0)
        fresh = {
            "clock": state["clock"] + 1,
            "episode": state["episode"] + 1,
            "step": 0,
            "start": start,
        }
        after = jax.tree.map(lambda a, b: jnp.where(done, a, b), fresh, ongoing)
        return after, TimeStep(
            obs=self._obs(after),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_obs=self._obs(ongoing),
        )

    def _obs(self, state):
        return jnp.stack([jnp.asarray(state[k], jnp.float32) for k in ("episode", "step", "start")])


@dataclasses.dataclass(frozen=True)
class Counter:
    """A recurrent policy whose carry counts the steps of the episode; V = carry + obs[1] / 100."""

    streams: bool = False

    def init(self, key, obs):
        return {"logits": jax.random.normal(key, (3,))}

    def initial_carry(self, batch_size):
        return {"count": jnp.full(batch_size, -7.0)}  # wrong unless it restarts at is_first

    def apply(self, params, carry, obs, is_first):
        count = jnp.where(is_first, 0, carry["count"]) + 1
        logits = params["logits"][None] + 0.1 * obs
        value = count + obs[:, 1] / 100
        value = {"a": value, "b": -value} if self.streams else value
        return {"count": count}, PolicyOutput(Categorical(logits), value, extras={"count": count})

    def value(self, params, carry, obs, is_first):
        return self.apply(params, carry, obs, is_first)[1].value


@dataclasses.dataclass(frozen=True)
class WithExtras(Counter):
    def act_extras(self, params, output, action):
        return {"twice": 2 * action}


def start(env, policy, num_envs=3, seed=0):
    actor = init_actor(env, policy, jax.random.key(seed), num_envs)
    return actor, policy.init(jax.random.key(100 + seed), actor.obs)


def by_hand(env, policy, params, actor, num_steps):
    """The same rollout as a Python loop over steps and environments, one at a time."""
    num_envs = actor.is_first.shape[0]
    env_key, policy_key = jax.random.split(jax.random.fold_in(actor.key, actor.num_rollouts))
    env_keys = jax.random.split(env_key, (num_steps, num_envs))
    noise = jax.random.uniform(policy_key, (num_steps, num_envs))
    env_step, apply = jax.jit(env.step), jax.jit(policy.apply)
    state, obs, carry, is_first = actor.env, actor.obs, actor.carry, actor.is_first
    rows, finals = [], []
    for t in range(num_steps):
        carry, output = apply(params, carry, obs, is_first)
        action = output.distribution.sample_with(noise[t])
        each = [
            env_step(env_keys[t, b], jax.tree.map(lambda x, b=b: x[b], state), action[b])
            for b in range(num_envs)
        ]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
        rows.append(
            Transition(
                obs=obs,
                action=action,
                reward=stacked[1].reward,
                terminated=stacked[1].terminated,
                truncated=stacked[1].truncated,
                log_prob=jax.nn.log_softmax(output.distribution.logits)[
                    jnp.arange(num_envs), action
                ],
                value=output.value,
                is_first=is_first,
                extras=output.extras,
            )
        )
        finals.append((stacked[1].final_obs, carry))
        state, obs = stacked[0], stacked[1].obs
        is_first = stacked[1].terminated | stacked[1].truncated
    return jax.tree.map(lambda *x: jnp.stack(x), *rows), finals, (state, obs, carry, is_first)


def assert_close(a: Any, b: Any, **kwargs: Any):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **kwargs), a, b)


def assert_equal(a: Any, b: Any):
    def bits(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), a, b)


SCRIPTS = [
    Script(random_start=True),
    Script((0, 1, 1, 0, 0), (0, 0, 1, 1, 0), random_start=True),  # adjacent ends, both at once
    Script((1,), (0,)),
    Script((0,), (1,)),
    Script((0,), (0,)),
]


@pytest.mark.parametrize("max_truncations", [2, None])
@pytest.mark.parametrize("env", SCRIPTS)
def test_rows_equal_a_hand_stepped_loop_over_two_rollouts(env, max_truncations):
    policy = Counter()
    actor, params = start(env, policy)
    for _ in range(2):
        rows, finals, (state, obs, carry, is_first) = by_hand(env, policy, params, actor, 7)
        actor, rollout = run(env, policy, params, actor, 7, max_truncations=max_truncations)
        rows_kept = rollout.final.step.shape[0]
        assert_close(rollout.transition.replace(bootstrap_value=None), rows, rtol=1e-6)
        assert_close((actor.env, actor.obs, actor.carry), (state, obs, carry), rtol=1e-6)
        assert_equal(rollout.last_is_first, is_first)
        assert_close(rollout.last_value, policy.value(params, carry, obs, is_first), rtol=1e-6)
        cut = np.asarray(rows.truncated & ~rows.terminated)
        written = np.zeros(3, int)
        overflow = 0
        for t, b in np.argwhere(cut):
            final_obs, final_carry = finals[t]
            expected = final_carry["count"][b] + 1 + final_obs[b, 1] / 100
            if written[b] < rows_kept:
                row = int(written[b])
                assert_close(rollout.final.obs[row, b], final_obs[b], rtol=1e-6)
                assert_close(rollout.final.carry["count"][row, b], final_carry["count"][b])
                assert rollout.final.step[row, b] == t
            elif max_truncations is not None:
                expected, overflow = rows.value[t, b], overflow + 1
            np.testing.assert_allclose(
                rollout.transition.bootstrap_value[t, b], expected, rtol=1e-6
            )
            written[b] += 1
        assert not rollout.transition.bootstrap_value[~cut].any()
        assert int(rollout.final.overflow) == overflow
        for b in range(3):
            assert (rollout.final.step[int(written[b]) :, b] == 7).all()


def test_first_rows_restart_the_carry_and_follow_every_end():
    env, policy = Script(), Counter()
    actor, params = start(env, policy)
    actor, first = run(env, policy, params, actor, 5)
    _, second = run(env, policy, params, actor, 5)
    is_first = np.concatenate([first.transition.is_first, second.transition.is_first])[:, 0]
    assert is_first.tolist() == [True, False, False, True, True, False, False, True, True, False]
    assert first.transition.extras["count"][:, 0].tolist() == [1, 2, 3, 1, 1]


def test_max_truncations_can_be_fewer_more_or_none():
    env, policy = Script((0,), (1,)), Counter()
    actor, params = start(env, policy)
    for rows, expected in ((0, 12), (1, 9), (4, 0), (6, 0)):
        _, rollout = run(env, policy, params, actor, 4, max_truncations=rows)
        assert rollout.final.step.shape == (rows, 3)
        assert rollout.final.obs.shape == (rows, 3, 3)
        assert int(rollout.final.overflow) == expected
        # carry 1 after the only step, then 2 at the final observation, whose step is 1
        values = np.asarray(rollout.transition.bootstrap_value)
        filled = min(rows, 4)
        np.testing.assert_allclose(values[:filled], 2.01, rtol=1e-6)
        np.testing.assert_allclose(values[filled:], 1.0)


@dataclasses.dataclass(frozen=True)
class Short:
    """Never ends by itself; the observation is the step, so V(final observation) is known."""

    observation_space = spaces.Box.create(0, np.inf, (3,))
    action_space = spaces.Discrete(3)

    def reset(self, key):
        return jnp.float32(0), jnp.zeros(3)

    def step(self, key, state, action):
        return state + 1, jnp.full(3, state + 1), jnp.float32(1), jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class Cut(Short):
    """As `Short`, but truncates after four steps by itself."""

    def step(self, key, state, action):
        return *super().step(key, state, action), state >= 3


@dataclasses.dataclass(frozen=True)
class Cost(Wrapper):
    def reward(self, reward):
        return reward - 1


@dataclasses.dataclass(frozen=True)
class CostStep(Wrapper):
    def step(self, key, state, action):
        state, step = self.env.step(key, state, action)
        return state, step.replace(reward=step.reward - 1)


@dataclasses.dataclass(frozen=True)
class CostStepKnown(CostStep):
    time_limit = property(lambda self: time_limit(self.env))


@dataclasses.dataclass(frozen=True)
class CutMore(Wrapper):
    def step(self, key, state, action):
        state, step = self.env.step(key, state, action)
        return state, step.replace(truncated=step.truncated | (step.reward > 100))


LIMITED = TimeLimit(autoreset(Short()), 4)


@pytest.mark.parametrize(
    ("env", "limit", "rows"),
    [
        (LIMITED, 4, 4),
        (Cost(LIMITED), 4, 4),
        (CostStep(LIMITED), None, 1),
        (CostStepKnown(LIMITED), 4, 4),
        (CutMore(LIMITED), None, 1),
        (autoreset(Cut()), None, 1),
        (TimeLimit(autoreset(Cut()), 100), None, 1),
    ],
)
def test_every_truncated_step_bootstraps_from_its_final_observation(env, limit, rows):
    assert time_limit(env) == limit
    policy = Counter()
    actor, params = start(env, policy, num_envs=2)
    actor, _ = run(env, policy, params, actor, 2)  # so that episodes do not start with the rollout
    _, rollout = run(env, policy, params, actor, 16)
    cut = np.asarray(rollout.transition.truncated)
    assert cut.sum() == 8
    values = np.asarray(rollout.transition.bootstrap_value)
    np.testing.assert_allclose(values[cut], 5.04, rtol=1e-6)  # carry 5, observation 4
    assert not values[~cut].any()
    assert rollout.final.step.shape == (rows, 2)
    assert rollout.final.step[:, 0].tolist() == [1, 5, 9, 13][:rows]
    assert int(rollout.final.overflow) == 0


def test_environments_that_never_truncate_keep_and_value_no_final_observation():
    env, policy = autoreset(Short()), Counter()
    assert time_limit(env) == math.inf
    actor, params = start(env, policy)
    _, rollout = jax.eval_shape(lambda: collect(env, policy, params, actor, 16))
    assert rollout.final.step.shape == (0, 3)

    def operations(max_truncations):
        def program(params, actor):
            options = {"max_truncations": max_truncations}
            actor, rollout = collect(env, policy, params, actor, 16, **options)
            return actor, rollout.replace(final=None)

        return jax.jit(program).lower(params, actor).compile().as_text().count(" = ")

    assert operations(None) == operations(0) < operations(1)


def test_a_time_limit_that_is_not_true_is_counted():
    @dataclasses.dataclass(frozen=True)
    class Wrong(Cut):
        time_limit = 8

    env, policy = autoreset(Wrong()), Counter()
    actor, params = start(env, policy)
    _, rollout = run(env, policy, params, actor, 16)
    assert int(rollout.final.overflow) == 3 * 2


def test_without_bootstrap_the_final_rows_are_kept_but_not_valued():
    @dataclasses.dataclass(frozen=True)
    class Counting(Counter):
        def value(self, params, carry, obs, is_first):
            assert obs.shape[0] == 3  # only the last observation is valued
            return super().value(params, carry, obs, is_first)

    env, policy = Script((0,), (1,)), Counting()
    actor, params = start(env, policy)
    _, rollout = run(env, policy, params, actor, 2, bootstrap=False)
    assert rollout.transition.bootstrap_value.tolist() == [[1.0] * 3] * 2
    assert rollout.final.step.tolist() == [[0] * 3, [1] * 3]
    assert rollout.final.carry["count"].tolist() == [[1.0] * 3] * 2


def test_values_may_be_a_dict_of_streams():
    env, policy = Script((0,), (1,)), Counter(streams=True)
    actor, params = start(env, policy)
    _, rollout = run(env, policy, params, actor, 2)
    values = rollout.transition.bootstrap_value
    np.testing.assert_allclose(values["a"], 2.01, rtol=1e-6)
    np.testing.assert_allclose(values["b"], -2.01, rtol=1e-6)
    assert rollout.last_value.keys() == {"a", "b"}


def test_a_policy_without_values_collects_too():
    @dataclasses.dataclass(frozen=True)
    class NoCritic(Counter):
        def apply(self, params, carry, obs, is_first):
            carry, output = super().apply(params, carry, obs, is_first)
            return carry, output.replace(value=None)

    env, policy = Script(), NoCritic()
    actor, params = start(env, policy)
    _, rollout = run(env, policy, params, actor, 4)
    assert rollout.last_value is None
    assert rollout.transition.bootstrap_value is None


def leaves_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_envs", [3, 2000, 5000])  # 5000 rows are valued step by step
def test_values_after_the_scan_equal_those_within_the_step(num_envs):
    class InStep(ActorCriticPolicy):
        has_separate_value = False

    env = make_env("CartPole-v1", max_steps_in_episode=5)
    policy = make_policy(env.observation_space, env.action_space, hidden_sizes=(8,))
    assert policy.has_separate_value
    actor, params = start(env, policy, num_envs)
    got = run(env, policy, params, actor, 8)
    in_step = InStep(policy.architecture, policy.shared_torso)
    leaves_close(got, run(env, in_step, params, actor, 8))
    assert bool(got[1].transition.truncated.any())


@pytest.mark.parametrize("name", ["_DRAWN_BYTES", "_SMALL_FINAL"])
def test_what_is_drawn_or_written_another_way_is_the_same(monkeypatch, name):
    env = make_env("CartPole-v1", max_steps_in_episode=5)
    policy = make_policy(env.observation_space, env.action_space, hidden_sizes=(8,))
    actor, params = start(env, policy)
    expected = run(env, policy, params, actor, 12)
    monkeypatch.setattr(rollout_module, name, 0)
    leaves_close(collect(env, policy, params, actor, 12), expected)


@dataclasses.dataclass(frozen=True)
class KeepsKeys:
    """An environment without resets of its own that keeps keys in its state, and mixes them."""

    mixes: bool = False
    observation_space = spaces.Box.create(-np.inf, np.inf, (1,))
    action_space = spaces.Discrete(3)

    def reset(self, key):
        kept = jnp.where(jax.random.bernoulli(key), key, jax.random.key(1)) if self.mixes else key
        return kept, jax.random.normal(key, (1,))

    def step(self, key, state, action):
        obs = jax.random.normal(jax.random.fold_in(state, 3), (1,))
        return key, obs, obs[0], obs[0] > 0.5


@pytest.mark.parametrize("mixes", [False, True])
def test_an_environment_may_keep_keys_in_its_state(mixes):
    env = autoreset(KeepsKeys(mixes))
    policy = make_policy(env.observation_space, env.action_space, hidden_sizes=(8,))
    actor, params = start(env, policy)
    after, rollout = collect(env, policy, params, actor, 9)
    assert after.env.dtype == actor.env.dtype == actor.key.dtype
    assert bool(rollout.transition.terminated.any())


def test_extras_come_from_the_action_if_the_policy_says_so():
    env, policy = Script(), WithExtras()
    actor, params = start(env, policy)
    _, rollout = run(env, policy, params, actor, 4)
    assert_equal(rollout.transition.extras["twice"], 2 * rollout.transition.action)


def test_deterministic_takes_the_mode():
    env, policy = Script(), Counter()
    actor, params = start(env, policy)
    _, rollout = run(env, policy, params, actor, 6, deterministic=True)
    logits = params["logits"][None, None] + 0.1 * rollout.transition.obs
    assert_equal(rollout.transition.action, jnp.argmax(logits, -1).astype(jnp.int32))


@pytest.mark.parametrize("sequence_length", [1, 2, 6])
def test_initial_carries_stand_before_every_sequence(sequence_length):
    env, policy = Script(), Counter()
    actor, params = start(env, policy)
    actor, _ = run(env, policy, params, actor, 2)  # start within an episode
    _, whole = run(env, policy, params, actor, 6)
    _, rollout = run(env, policy, params, actor, 6, sequence_length=sequence_length)
    assert_equal(rollout.transition, whole.transition)
    assert_equal(rollout.final, whole.final)
    before = np.concatenate([actor.carry["count"][None], whole.transition.extras["count"][:-1]])
    assert_equal(rollout.initial_carry["count"], before[::sequence_length])


def test_lengths_of_more_steps_than_an_int32_holds_are_summed():
    running = EpisodeStatistics(jnp.zeros(4), jnp.full(4, 2**30, jnp.int32))
    done = jnp.array([[True] * 4, [False] * 4])
    after, ended = count_episodes(running, jnp.ones((2, 4)), done)
    assert float(ended.length_sum) == 4 * 2**30  # + 4, which a float32 does not hold
    assert after.episode_length.tolist() == [1] * 4


def test_episode_sums_count_what_ended_across_rollouts():
    env, policy = Script(), Counter()
    actor, params = start(env, policy)
    count, returns, lengths, rewards = 0, 0.0, 0, []
    for _ in range(5):
        actor, rollout = run(env, policy, params, actor, 5)
        count += int(rollout.episodes.count)
        returns += float(rollout.episodes.return_sum)
        lengths += int(rollout.episodes.length_sum)
        rewards.append(rollout.transition.reward)
    rewards = np.concatenate(rewards)  # 25 steps: ends after 3, 4, 7, 8, …, 23, 24
    assert (count, lengths) == (12 * 3, 24 * 3)
    np.testing.assert_allclose(returns, rewards[:24].sum(), rtol=1e-6)
    np.testing.assert_allclose(actor.statistics.episode_return, rewards[24], rtol=1e-6)
    assert actor.statistics.episode_length.tolist() == [1, 1, 1]


def test_rollouts_repeat_for_a_key_and_differ_between_keys_and_rollouts():
    env, policy = Script(random_start=True), Counter()
    actor, params = start(env, policy, num_envs=16)
    again, _ = start(env, policy, num_envs=16)
    after, one = run(env, policy, params, actor, 8)
    _, same = run(env, policy, params, again, 8)
    assert_equal(one, same)
    other, _ = start(env, policy, num_envs=16, seed=1)
    assert (run(env, policy, params, other, 8)[1].transition.action != one.transition.action).any()
    assert (run(env, policy, params, after, 8)[1].transition.action != one.transition.action).any()


def test_one_compilation_and_one_tree_for_all_rollouts():
    env, policy = Script(), Counter()
    actor, params = start(env, policy)

    @jax.jit
    @chex.assert_max_traces(1)
    def step(params, actor):
        return collect(env, policy, params, actor, 4)[0]

    first = actor
    for _ in range(3):
        actor = step(params, actor)
        chex.assert_trees_all_equal_shapes_and_dtypes(actor, first)
    assert int(actor.num_rollouts) == 3


def stacked_actors(env, policy, num_actors=4):
    keys = jax.random.split(jax.random.key(3), num_actors)
    make = functools.partial(init_actor, env, policy, num_envs=3)
    solo = [make(key) for key in keys]
    return solo, jax.tree.map(lambda *x: jnp.stack(x), *solo)


def test_map_and_vmap_over_actors_equal_solo_runs():
    env, policy = Script(random_start=True), Counter()
    solo, actors = stacked_actors(env, policy)
    params = policy.init(jax.random.key(0), solo[0].obs)
    one = functools.partial(collect, env, policy, params, num_steps=6)
    alone = [jax.jit(one)(actor) for actor in solo]
    alone = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    assert_equal(jax.jit(lambda a: jax.lax.map(one, a))(actors), alone)
    batched = jax.jit(jax.vmap(one))(actors)
    assert_equal(batched[0].env, alone[0].env)
    assert_close(batched[1], alone[1], rtol=1e-6)


@pytest.mark.parametrize("check_vma", [False, True])
def test_sharded_actors_equal_mapped_ones_bitwise(check_vma):
    env, policy = Script(random_start=True), Counter()
    solo, actors = stacked_actors(env, policy)
    params = policy.init(jax.random.key(0), solo[0].obs)
    mesh = jax.make_mesh((2,), ("actors",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("actors")

    def every(params, actors):
        one = functools.partial(collect, env, policy, params, num_steps=6, sequence_length=3)
        return jax.lax.map(one, actors)

    sharded = jax.shard_map(
        every, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec, check_vma=check_vma
    )
    assert_equal(jax.jit(sharded)(params, actors), jax.jit(every)(params, actors))


@pytest.mark.parametrize("env", [LIMITED, autoreset(Cut())])
def test_actors_made_and_scanned_inside_shard_map_equal_those_outside(env):
    policy = Counter()
    params = {"logits": jnp.arange(3.0)}
    mesh = jax.make_mesh((2,), ("actors",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 2)

    def every(params, keys):
        def body(actor, _):
            return collect(env, policy, params, actor, 6, sequence_length=3)

        def one(key):
            return jax.lax.scan(body, init_actor(env, policy, key, 2), length=2)

        return jax.lax.map(one, keys)

    expected = jax.jit(every)(params, keys)
    for check_vma in (True, False):
        sharded = jax.shard_map(
            every,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("actors")),
            out_specs=PartitionSpec("actors"),
            check_vma=check_vma,
        )
        assert_equal(jax.jit(sharded)(params, keys), expected)


def test_vmap_over_params_equals_solo_runs():
    env, policy = Script(random_start=True), Counter()
    actor, _ = start(env, policy)
    params = jax.vmap(policy.init, (0, None))(jax.random.split(jax.random.key(5), 3), actor.obs)
    one = functools.partial(collect, env, policy, actor=actor, num_steps=6)
    batched = jax.vmap(lambda p: one(params=p)[1].transition)(params)
    for i in range(3):
        alone = run(env, policy, jax.tree.map(lambda x, i=i: x[i], params), actor, 6)[1].transition
        assert_close(jax.tree.map(lambda x, i=i: x[i], batched), alone, rtol=1e-6)


def test_memory_does_not_grow_with_the_number_of_rollouts():
    env, policy = Script(), Counter()
    actor, params = start(env, policy)
    actor, rollout = run(env, policy, params, actor, 4)
    jax.block_until_ready(rollout)
    before = len(jax.live_arrays())
    for _ in range(20):
        actor, rollout = run(env, policy, params, actor, 4)
    jax.block_until_ready(rollout)
    assert len(jax.live_arrays()) == before


def test_truncated_cartpole_has_the_advantages_of_a_long_trajectory():
    """Ten-step episodes bootstrap as if the trajectory had gone on and been cut in the books."""
    env = make_env("CartPole-v1", max_steps_in_episode=10)
    policy = make_policy(env.observation_space, env.action_space)
    actor = init_actor(env, policy, jax.random.key(0), 4)
    params = policy.init(jax.random.key(1), actor.obs)
    _, rollout = run(env, policy, params, actor, 25, max_truncations=3)
    rows = rollout.transition
    assert int((rows.truncated & ~rows.terminated).sum()) > 4
    assert int(rollout.final.overflow) == 0

    # By hand: the untruncated environment, one episode at a time, with the same actions.
    endless = make_env("CartPole-v1", max_steps_in_episode=10**6)
    step, discount, trace = jax.jit(endless.step), 0.99, 0.95
    is_first, action = np.asarray(rows.is_first), np.asarray(rows.action)
    expected = np.zeros((25, 4), np.float64)
    for b in range(4):
        starts = [*np.nonzero(is_first[:, b])[0].tolist(), 25]
        for begin, end in itertools.pairwise(starts):
            x = rows.obs[begin, b]
            state = jax.tree.map(lambda leaf, b=b: leaf[b], actor.env)
            state = state.replace(x=x[0], x_dot=x[1], theta=x[2], theta_dot=x[3], time=jnp.int32(0))
            seen, rewards, terminated = [np.asarray(x)], [], False
            for t in range(begin, end):
                state, result = step(jax.random.key(0), state, action[t, b])
                seen.append(np.asarray(result.final_obs))
                rewards.append(float(result.reward))
                terminated = bool(result.terminated)
            values = np.array(policy.value(params, (), np.stack(seen), np.zeros(len(seen), bool)))
            if terminated:
                values[-1] = 0
            advantage = 0.0
            for t in reversed(range(end - begin)):
                delta = rewards[t] + discount * values[t + 1] - values[t]
                advantage = delta + discount * trace * advantage
                expected[begin + t, b] = advantage

    following = np.concatenate([rows.value[1:], rollout.last_value[None]])
    following = np.where(rows.truncated, rows.bootstrap_value, following)
    following = np.where(rows.terminated, 0, following)
    delta = rows.reward + discount * following - rows.value
    advantage, got = np.zeros(4), np.zeros((25, 4))
    for t in reversed(range(25)):
        done = np.asarray(rows.terminated[t] | rows.truncated[t])
        advantage = np.asarray(delta[t]) + discount * trace * np.where(done, 0, advantage)
        got[t] = advantage
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "network"),
    plain(
        [
            ("Pendulum-v1", "mlp"),
            ("MountainCarContinuous-v0", "gru"),
            ("Breakout-MinAtar", "auto"),
            ("MemoryChain-bsuite", "lstm"),
        ],
        [("Pendulum-v1", "mlp")],
    ),
)
def test_gymnax_environments_collect_with_the_default_networks(name, network):
    env = make_env(name)
    policy = make_policy(env.observation_space, env.action_space, network=network)
    actor = init_actor(env, policy, jax.random.key(0), 2)
    params = policy.init(jax.random.key(1), actor.obs)
    actor, rollout = run(env, policy, params, actor, 6, sequence_length=3)
    rows = rollout.transition
    assert rows.reward.shape == (6, 2)
    assert rows.reward.dtype == jnp.float32
    if isinstance(env.action_space, spaces.Discrete):
        assert env.action_space.contains(np.asarray(rows.action))
    carry = policy.initial_carry(2)
    _, again = policy.unroll(params, carry, rows.obs, rows.is_first)
    np.testing.assert_allclose(again.value, rows.value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        again.distribution.log_prob(rows.action), rows.log_prob, rtol=1e-4, atol=1e-5
    )


def test_wrong_lengths_are_refused_with_the_way_out():
    env, policy = Script(), Counter()
    actor, params = start(env, policy)
    with pytest.raises(ValueError, match="length must divide num_steps = 12, got 5"):
        collect(env, policy, params, actor, 12, sequence_length=5)
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        collect(env, policy, params, actor, 0)
    with pytest.raises(ValueError, match="max_truncations must be at least 0, got -1"):
        collect(env, policy, params, actor, 4, max_truncations=-1)
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        init_actor(env, policy, jax.random.key(0), 0)


def test_an_environment_that_changes_its_dtype_is_named():
    @dataclasses.dataclass(frozen=True)
    class Changing(Script):
        def reset(self, key):
            state, obs = super().reset(key)
            return state, obs.astype(jnp.float16)

    env, policy = Changing(), Counter()
    actor, params = start(env, policy)
    with pytest.raises(
        ValueError, match=r"the observation must keep .* float16\[3, 3\] .* float32"
    ):
        collect(env, policy, params, actor, 4)


def test_noise_is_drawn_at_once_only_where_the_distribution_offers_it():
    class Plain(Node):
        logits: Any

        def sample(self, key):
            return jax.random.categorical(key, self.logits)

        def log_prob(self, action):
            return Categorical(self.logits).log_prob(action)

    @dataclasses.dataclass(frozen=True)
    class ByKey(Counter):
        def apply(self, params, carry, obs, is_first):
            carry, output = super().apply(params, carry, obs, is_first)
            return carry, output.replace(distribution=Plain(output.distribution.logits))

    env, policy = Script(), ByKey()
    actor, params = start(env, policy, num_envs=256)
    _, rollout = run(env, policy, params, actor, 8)
    first = np.asarray(rollout.transition.action[0])
    shares = np.bincount(first, minlength=3) / 256
    np.testing.assert_allclose(shares, jax.nn.softmax(params["logits"]), atol=0.12)
    assert (rollout.transition.action[0] != rollout.transition.action[4]).any()


def test_no_key_is_used_twice():
    env = make_env("CartPole-v1")
    policy = make_policy(env.observation_space, env.action_space, hidden_sizes=(4,))
    with jax.debug_key_reuse(True):
        actor = jax.jit(lambda key: init_actor(env, policy, key, 2))(jax.random.key(0))
        params = policy.init(jax.random.key(1), actor.obs)
        rollout = jax.jit(lambda params, actor: collect(env, policy, params, actor, 3))
        for _ in range(2):
            actor, _ = rollout(params, actor)
