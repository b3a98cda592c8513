"""Statistics equal numpy's over all rows at once, however these were split."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxroll import spaces
from jaxroll.networks import make_policy
from jaxroll.normalizers import (
    NormalizedParams,
    NormalizedPolicy,
    RewardScaler,
    RunningStatistics,
    discounted_sums,
)
from jaxroll.types import PolicyOutput

update = jax.jit(RunningStatistics.update)


def rows(seed, n, loc=3.0, scale=2.0):
    return np.random.default_rng(seed).normal(loc, scale, (n, 3)).astype(np.float32)


def statistics_of(*batches):
    statistics = RunningStatistics.create(np.zeros(3))
    for batch in batches:
        statistics = update(statistics, batch)
    return statistics


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
@settings(deadline=None, max_examples=15)
def test_statistics_equal_numpy_however_the_rows_are_split(sizes):
    batches = [rows(i, n, loc=5.0 * i) for i, n in enumerate(sizes)]
    everything = np.concatenate(batches).astype(np.float64)
    statistics = statistics_of(*batches)
    assert float(statistics.count) == len(everything)
    np.testing.assert_allclose(statistics.mean, everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics.std, everything.std(0), rtol=1e-4, atol=1e-5)
    backwards = statistics_of(*batches[::-1])
    np.testing.assert_allclose(statistics.mean, backwards.mean, rtol=1e-5)
    np.testing.assert_allclose(statistics.variance, backwards.variance, rtol=1e-4, atol=1e-5)


def test_a_large_offset_keeps_the_spread():
    batches = [rows(i, 500, loc=1e5, scale=1.0) for i in range(20)]
    everything = np.concatenate(batches).astype(np.float64)
    statistics = statistics_of(*batches)
    np.testing.assert_allclose(statistics.mean, everything.mean(0), rtol=1e-6)
    np.testing.assert_allclose(statistics.std, everything.std(0), rtol=2e-3)


def test_leading_axes_trees_and_dtypes_of_any_kind():
    rng = np.random.default_rng(0)
    batch = {
        "pixels": rng.integers(0, 256, (5, 4, 2, 2), dtype=np.uint8),
        "position": (rng.normal(size=(5, 4)).astype(np.float32), rng.integers(0, 9, (5, 4, 3))),
    }
    example = jax.tree.map(lambda x: x[0, 0], batch)
    statistics = update(RunningStatistics.create(example), batch)
    jax.tree.map(
        lambda got, x: np.testing.assert_allclose(got, x.mean((0, 1)), rtol=1e-5, atol=1e-6),
        statistics.mean,
        batch,
    )
    jax.tree.map(
        lambda got, x: np.testing.assert_allclose(got, x.std((0, 1)), rtol=1e-5, atol=1e-6),
        statistics.std,
        batch,
    )
    normal = statistics.normalize(batch)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(normal))
    np.testing.assert_allclose(normal["pixels"].mean((0, 1)), 0, atol=1e-5)
    np.testing.assert_allclose(normal["pixels"].std((0, 1)), 1, atol=1e-4)


def test_rows_of_weight_zero_have_no_effect():
    batch = rows(0, 6)
    weights = np.array([1, 1, 0, 1, 0, 1], np.float32)
    kept = batch[weights > 0]
    spoiled = np.where(weights[:, None] > 0, batch, np.nan)
    statistics = RunningStatistics.create(np.zeros(3)).update(spoiled, weights)
    np.testing.assert_allclose(statistics.mean, kept.mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics.std, kept.std(0), rtol=1e-5)
    assert float(statistics.count) == 4
    nothing = statistics.update(spoiled, np.zeros(6, bool))
    chex.assert_trees_all_equal(nothing, statistics)
    fresh = RunningStatistics.create(np.zeros(3)).update(spoiled, np.zeros(6))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(fresh))


def test_rows_that_are_not_finite_have_no_effect():
    batch = {"a": rows(0, 6), "b": rows(1, 6)[:, :1], "n": np.arange(6)}
    batch["a"][1, 2], batch["b"][4, 0] = np.nan, np.inf
    good = jax.tree.map(lambda x: x[[0, 2, 3, 5]], batch)
    empty = RunningStatistics.create(jax.tree.map(lambda x: x[0], batch))
    seen, expected = update(empty, batch), update(empty, good)
    assert seen.count == 4
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), seen, expected)
    nothing = update(seen, jax.tree.map(lambda x: x[[1, 4]], batch))
    chex.assert_trees_all_equal(nothing, seen)


def test_sums_start_anew_after_one_that_is_not_finite():
    rewards = np.array([[1.0], [np.nan], [2.0], [4.0]], np.float32)
    no = np.zeros((4, 1), bool)
    sums, after = discounted_sums(rewards, no, no, jnp.zeros(1), 0.5)
    np.testing.assert_array_equal(sums[:, 0], [1, np.nan, 2, 5])
    assert after.tolist() == [5]
    scaler = RewardScaler.create(0.5).update(sums)
    assert scaler.statistics.count == 3


def test_the_count_goes_on_past_what_a_float32_can_count():
    one = RunningStatistics.create(np.zeros(())).batch_statistics(jnp.zeros(1))
    start = dataclasses.replace(one, count=jnp.float32(2**24))

    @jax.jit
    def count(statistics):
        return jax.lax.scan(lambda m, _: (m.merge(one), None), statistics, length=5001)[0]

    after = count(start)
    assert float(np.float64(after.count) + np.float64(after.count_rest)) == 2**24 + 5001
    assert abs(float(after.count) - (2**24 + 5001)) <= 1


def test_billions_of_rows_leave_the_variance_where_it_is():
    statistics = statistics_of(rows(0, 4096))
    many = statistics.replace(count=jnp.float32(5e10))

    @jax.jit
    def add(statistics):
        batch = jnp.asarray(rows(0, 4096))
        return jax.lax.scan(lambda m, _: (m.update(batch), None), statistics, length=300)[0]

    np.testing.assert_allclose(add(many).variance, statistics.variance, rtol=1e-5)
    np.testing.assert_allclose(add(many).mean, statistics.mean, rtol=1e-5)


def test_actors_merge_in_their_order_bitwise_on_any_number_of_devices():
    start = jax.tree.map(jnp.asarray, statistics_of(rows(99, 7)))
    batches = jnp.stack([jnp.asarray(rows(i, 16, loc=i)) for i in range(8)])

    def every(start, batches, axis=None):
        stacked = jax.lax.map(start.batch_statistics, batches)
        if axis is not None:
            stacked = jax.lax.all_gather(stacked, axis, tiled=True)
        return start.merge_all(stacked)

    results = [jax.jit(every)(start, batches)]
    for devices in (2, 8):
        mesh = jax.make_mesh((devices,), ("actors",), axis_types=(AxisType.Auto,))
        sharded = jax.shard_map(
            functools.partial(every, axis="actors"),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("actors")),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        results.append(jax.jit(sharded)(start, batches))
    for other in results[1:]:
        chex.assert_trees_all_equal(other, results[0])
    # … and in that order, one after the other
    by_hand = start
    for batch in batches:
        by_hand = by_hand.merge(start.batch_statistics(batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results[0], by_hand)
    everything = np.concatenate([rows(99, 7), *np.asarray(batches)]).astype(np.float64)
    np.testing.assert_allclose(results[0].mean, everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(results[0].std, everything.std(0), rtol=1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
def test_actors_pooled_by_one_formula_are_those_added_one_by_one(check_vma):
    start = jax.tree.map(jnp.asarray, statistics_of(rows(99, 7)))
    batches = jnp.stack([jnp.asarray(rows(i, 16, loc=1e4 + i)) for i in range(8)])
    weights = jnp.ones((8, 16)).at[3].set(0).at[5, :7].set(0)  # actors of unequal weight, and none

    def every(start, batches, weights, axis=None):
        stacked = jax.vmap(start.batch_statistics)(batches, weights)
        return start.merge_pooled(stacked, axis)

    results = [jax.jit(every)(start, batches, weights)]
    assert "scan" not in str(jax.make_jaxpr(every)(start, batches, weights))
    for devices in (2, 8):
        mesh = jax.make_mesh((devices,), ("actors",), axis_types=(AxisType.Auto,))
        sharded = jax.shard_map(
            functools.partial(every, axis="actors"),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("actors"), PartitionSpec("actors")),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
        results.append(jax.jit(sharded)(start, batches, weights))
    counted = np.asarray(batches, np.float64)[np.asarray(weights) > 0]
    everything = np.concatenate([rows(99, 7), counted])
    for result in results:
        assert float(result.count) == len(everything)
        np.testing.assert_allclose(result.mean, everything.mean(0), rtol=1e-5)
        np.testing.assert_allclose(result.std, everything.std(0), rtol=1e-5)
    nothing = start.merge_pooled(jax.vmap(start.batch_statistics)(batches, 0 * weights))
    chex.assert_trees_all_equal(nothing, start)


def test_normalized_observations_are_clipped_and_keep_their_float_dtype():
    statistics = statistics_of(rows(0, 100))
    x = np.array([[1e6, -1e6, 3.0]], np.float32)
    y = statistics.normalize(x)
    assert y[0, :2].tolist() == [10.0, -10.0]
    assert float(statistics.normalize(x, clip=None)[0, 0]) > 1e5
    assert statistics.normalize(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_nothing_seen_changes_nothing_and_a_constant_entry_stays_finite():
    statistics = RunningStatistics.create(np.zeros(3))
    x = rows(0, 4)
    np.testing.assert_array_equal(statistics.normalize(x), x)
    constant = statistics.update(np.full((50, 3), 12345.678, np.float32))
    y = constant.normalize(np.full((2, 3), 12345.678, np.float32))
    assert np.abs(y).max() < 0.2


def test_wrong_shapes_are_refused():
    statistics = RunningStatistics.create(np.zeros(3))
    with pytest.raises(ValueError, match="observation's shapes after common leading axes"):
        statistics.update(np.zeros((5, 4)))
    with pytest.raises(ValueError, match=r"leading axes of the batch, \[5\], got \[4\]"):
        statistics.update(np.zeros((5, 3)), np.ones(4))


def test_discounted_sums_equal_a_loop_and_go_on_over_rollouts():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(9, 4)).astype(np.float32)
    terminated, truncated = rng.random((2, 9, 4)) < 0.2
    expected, total = np.zeros((9, 4)), np.zeros(4)
    for t in range(9):
        total = rewards[t] + 0.9 * total
        expected[t] = total
        total = np.where(terminated[t] | truncated[t], 0, total)
    sums, last = discounted_sums(rewards, terminated, truncated, np.zeros(4), 0.9)
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, total, rtol=1e-5, atol=1e-6)
    first, between = discounted_sums(rewards[:5], terminated[:5], truncated[:5], np.zeros(4), 0.9)
    second, end = discounted_sums(rewards[5:], terminated[5:], truncated[5:], between, 0.9)
    np.testing.assert_allclose(np.concatenate([first, second]), sums, rtol=1e-6)
    np.testing.assert_allclose(end, last, rtol=1e-6)
    uncut, _ = discounted_sums(np.ones((3, 1)), None, None, np.zeros(1), 0.5)
    assert uncut[:, 0].tolist() == [1.0, 1.5, 1.75]


def test_rewards_are_divided_by_the_spread_of_their_sums_and_not_shifted():
    rng = np.random.default_rng(0)
    rewards = rng.normal(5, 2, (200, 8)).astype(np.float32)
    scaler = RewardScaler.create(0.9)
    np.testing.assert_array_equal(scaler.scale(rewards, clip=None), rewards)
    sums, _ = discounted_sums(rewards, None, None, np.zeros(8), scaler.discount)
    scaler = scaler.update(sums)
    expected = rewards / np.asarray(sums, np.float64).std()
    np.testing.assert_allclose(scaler.scale(rewards), expected, rtol=1e-4)
    scales = jax.vmap(lambda g: scaler.replace(discount=g).discount)(jnp.array([0.9, 0.99]))
    assert scales.shape == (2,)


@dataclasses.dataclass(frozen=True)
class Linear:
    """Records what it was given: the logits are the observation, V its sum times w."""

    def init(self, key, obs):
        return {"w": jnp.ones(())}

    def initial_carry(self, batch_size):
        return ()

    def apply(self, params, carry, obs, is_first):
        x = obs["x"] if isinstance(obs, dict) else obs
        return carry, PolicyOutput(obs, params["w"] * x.sum(-1), extras={"seen": obs})

    unroll = apply

    def value(self, params, carry, obs, is_first):
        return self.apply(params, carry, obs, is_first)[1].value

    def act_extras(self, params, output, action):
        return {"w": params["w"], "action": action}


def test_the_inner_policy_sees_normalised_observations_everywhere():
    policy = NormalizedPolicy(Linear())
    obs = rows(0, 12)
    params = policy.init(jax.random.key(0), obs)
    params = policy.update_statistics(params, obs)
    expected = (obs - obs.mean(0)) / obs.std(0)
    is_first = np.zeros(12, bool)
    _, output = policy.apply(params, (), obs, is_first)
    np.testing.assert_allclose(output.extras["seen"], expected, atol=1e-5)
    np.testing.assert_allclose(policy.value(params, (), obs, is_first), output.value)
    _, unrolled = policy.unroll(params, (), obs.reshape(3, 4, 3), is_first.reshape(3, 4))
    np.testing.assert_allclose(unrolled.value.reshape(-1), output.value, atol=1e-6)
    assert policy.act_extras(params, output, 5)["action"] == 5
    assert policy.initial_carry(3) == ()


def test_statistics_have_no_gradient_and_the_policy_has():
    policy = NormalizedPolicy(Linear())
    obs = rows(0, 12)
    params = policy.update_statistics(policy.init(jax.random.key(0), obs), obs)
    loss = lambda p: jnp.sum(policy.value(p, (), obs + 1, None) ** 2)  # noqa: E731
    gradient = jax.grad(loss)(params)
    assert isinstance(gradient, NormalizedParams)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(gradient.statistics))
    assert float(gradient.policy["w"]) != 0


def test_an_action_mask_is_handed_on_untouched():
    policy = NormalizedPolicy(Linear())
    obs = {"x": rows(0, 8), "action_mask": np.random.default_rng(0).random((8, 2)) < 0.5}
    params = policy.init(jax.random.key(0), obs)
    params = policy.update_statistics(params, obs)
    stacked = jax.tree.map(lambda x: x[None], policy.batch_statistics(params, obs))
    params = policy.merge_statistics(params, stacked)
    assert float(params.statistics.count) == 16
    assert params.statistics.mean.keys() == {"x"}
    _, output = policy.apply(params, (), obs, np.zeros(8, bool))
    np.testing.assert_array_equal(output.extras["seen"]["action_mask"], obs["action_mask"])
    np.testing.assert_allclose(output.extras["seen"]["x"].mean(0), 0, atol=1e-5)


def test_it_is_a_hashable_value_and_wraps_the_default_networks():
    space = spaces.Box.create(-1, 1, (3,)), spaces.Discrete(2)
    policy = NormalizedPolicy(make_policy(*space, network="gru"))
    assert policy == NormalizedPolicy(make_policy(*space, network="gru"))
    assert hash(policy) == hash(NormalizedPolicy(make_policy(*space, network="gru")))
    obs = rows(0, 4)
    params = policy.init(jax.random.key(0), obs)
    carry, output = policy.apply(params, policy.initial_carry(4), obs, np.ones(4, bool))
    assert output.value.shape == (4,)
    assert jax.tree.structure(carry) == jax.tree.structure(policy.initial_carry(4))
