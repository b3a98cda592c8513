"""Plans: each row exactly once, uniformly shuffled, in the sizes asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxroll.storages.minibatches import MinibatchPlan, permutation, plan, take

KEY = jax.random.key(0)


# The permutation.


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 255, 256, 512, 1000, 4096, 2**17])
def test_permutation_has_each_index_once(n):
    for seed in range(3):
        order = permutation(jax.random.key(seed), n)
        assert order.dtype == jnp.int32
        assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [50, 512])
def test_permutation_is_the_same_in_jit_vmap_and_shard_map(n):
    keys = jax.random.split(KEY, 8)
    alone = np.stack([permutation(k, n) for k in keys])
    assert len({tuple(row) for row in alone}) == 8
    jitted = jax.jit(lambda k: permutation(k, n))
    np.testing.assert_array_equal(np.stack([jitted(k) for k in keys]), alone)
    many = jax.vmap(lambda k: permutation(k, n))
    np.testing.assert_array_equal(many(keys), alone)
    np.testing.assert_array_equal(jax.jit(many)(keys), alone)
    mesh = jax.make_mesh((8,), ("actors",), axis_types=(jax.sharding.AxisType.Auto,))
    for check_vma in (False, True):
        spread = jax.shard_map(
            many,
            mesh=mesh,
            in_specs=jax.P("actors"),
            out_specs=jax.P("actors"),
            check_vma=check_vma,
        )
        np.testing.assert_array_equal(jax.jit(spread)(keys), alone)


def test_permutation_leaves_32_bit_numbers_as_they_were():
    def fun(key):
        order = permutation(key, 9)
        return order, jnp.arange(3), jnp.asarray(0.5), jax.random.uniform(key)

    for out in (fun(KEY), jax.jit(fun)(KEY)):
        assert [x.dtype.name for x in out] == ["int32", "int32", "float32", "float32"]
    assert not jax.config.jax_enable_x64
    with jax.enable_x64(True):
        assert permutation(KEY, 9).dtype == jnp.int32


def test_permutation_is_uniform():
    """Chi-square of where each element lands, of which two come first, and of all orders of 4."""
    draws = jax.jit(jax.vmap(lambda k: permutation(k, 10)))(jax.random.split(KEY, 20_000))
    draws = np.asarray(draws)

    def chi_square(counts):
        expected = counts.sum() / counts.size
        return ((counts - expected) ** 2 / expected).sum()

    landed = np.stack([np.bincount(draws[:, i], minlength=10) for i in range(10)])
    # 81 degrees of freedom (rows and columns are fixed): mean 81, deviation 12.7.
    assert chi_square(landed) < 81 + 4 * 12.7
    pairs = np.bincount(draws[:, 0] * 10 + draws[:, 1], minlength=100).reshape(10, 10)
    assert chi_square(pairs[~np.eye(10, dtype=bool)]) < 89 + 4 * 13.3
    four = jax.jit(jax.vmap(lambda k: permutation(k, 4)))(jax.random.split(jax.random.key(1), 9600))
    orders = np.unique(np.asarray(four) @ np.array([64, 16, 4, 1]), return_counts=True)[1]
    assert orders.size == 24
    assert chi_square(orders) < 23 + 4 * 6.8


def chi_square(counts, expected=None):
    """How far counts are from what is expected (all equal), in deviations of that distance."""
    expected = counts.sum() / counts.size if expected is None else expected
    free = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free)


@pytest.mark.parametrize("n", [256, 512, 4096])
def test_a_shuffle_without_a_sort_is_as_good_as_chance(n):
    """Where an element lands, how far two land apart, which element follows which, and how many
    pairs of neighbours stay together in one of eight minibatches."""
    count = 40_000 if n < 4096 else 20_000
    keys = jax.random.split(jax.random.key(n), count)
    draws = np.asarray(jax.jit(jax.vmap(lambda k: permutation(k, n)[:64]))(keys))
    for i in (0, 1, 7, 63):
        assert chi_square(np.bincount(draws[:, i] * 256 // n, minlength=256)) < 4
        assert chi_square(np.bincount(draws[:, i] % 256, minlength=256)) < 4
    for i, j in ((0, 1), (0, 2), (3, 32), (62, 63)):
        apart = (draws[:, i] - draws[:, j]) % n
        assert apart.min() > 0
        # No two are equal, so a distance has n − 1 values; the first class lacks one of them.
        counts = np.bincount(apart * 16 // n, minlength=16)
        expected = np.full(16, count * (n / 16) / (n - 1))
        expected[0] = count * (n / 16 - 1) / (n - 1)
        assert chi_square(counts, expected) < 4
    together = (draws[:, ::2] * 8 // n == draws[:, 1::2] * 8 // n).mean()
    chance = (n / 8 - 1) / (n - 1)
    assert abs(together - chance) < 4 * np.sqrt(chance * (1 - chance) / (count * 32))


def test_shuffles_of_other_keys_have_nothing_in_common():
    """Fixed points of one after the inverse of another: 1 on average, as for chance."""
    keys = jax.random.split(jax.random.key(5), 4000)
    draws = np.asarray(jax.jit(jax.vmap(lambda k: permutation(k, 1024)))(keys))
    agree = (draws[::2] == draws[1::2]).sum(1)
    assert abs(agree.mean() - 1) < 4 / np.sqrt(2000)
    assert abs(agree.var() - 1) < 0.25


# Sizes.


def test_every_epoch_has_each_row_once_and_its_own_order():
    p = plan(KEY, num_steps=6, num_envs=4, num_mini_batch=3, num_epochs=5)
    assert p.indices.shape == p.weights.shape == (15, 8)
    assert len(p) == 15
    epochs = p.indices.reshape(5, 24)
    assert (np.sort(epochs) == np.arange(24)).all()
    assert len({tuple(e.tolist()) for e in epochs}) == 5
    assert (p.weights == 1).all()


def test_without_shuffling_rows_keep_their_order():
    p = plan(None, num_steps=3, num_envs=2, mini_batch_size=2, shuffle=False, num_epochs=2)
    assert p.indices.tolist() == [[0, 1], [2, 3], [4, 5]] * 2


def test_neither_size_is_one_minibatch():
    assert plan(KEY, num_steps=3, num_envs=2).indices.shape == (1, 6)


def test_both_sizes_are_checked_against_each_other():
    p = plan(KEY, num_steps=4, num_envs=3, num_mini_batch=4, mini_batch_size=3)
    assert p.indices.shape == (4, 3)
    with pytest.raises(ValueError, match=r"4 \* 4 = 16 does not fit .* = 4 \* 3 = 12"):
        plan(KEY, num_steps=4, num_envs=3, num_mini_batch=4, mini_batch_size=4)
    p = plan(KEY, num_steps=4, num_envs=3, num_mini_batch=2, mini_batch_size=5, remainder="drop")
    assert p.indices.shape == (2, 5)
    p = plan(KEY, num_steps=4, num_envs=3, num_mini_batch=3, mini_batch_size=5, remainder="pad")
    assert p.weights.sum() == 12
    p = plan(KEY, num_steps=4, num_envs=3, mini_batch_size=16, remainder="pad")
    assert p.indices.shape == (1, 16)  # beyond the rollout: what is missing weighs 0
    assert p.weights.sum() == 12
    for remainder in ("drop", "pad"):
        with pytest.raises(ValueError, match="Give only one of the two"):
            plan(
                KEY,
                num_steps=4,
                num_envs=3,
                num_mini_batch=5,
                mini_batch_size=5,
                remainder=remainder,
            )


def test_a_remainder_is_an_error_that_offers_a_number():
    with pytest.raises(
        ValueError,
        match=r"num_mini_batch must divide num_steps \* num_envs = 32 \* 8 = 256, got 7\. "
        r'Use 8, or remainder="drop"',
    ):
        plan(KEY, num_steps=32, num_envs=8, num_mini_batch=7)
    with pytest.raises(ValueError, match=r"mini_batch_size must divide .* got 100\. Use 128"):
        plan(KEY, num_steps=32, num_envs=8, mini_batch_size=100)


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 40),
    number=st.integers(1, 40),
    by_count=st.booleans(),
    remainder=st.sampled_from(["drop", "pad"]),
)
def test_remainders(total, number, by_count, remainder):
    if number > total:
        return
    padded = -(-total // number)
    if by_count and remainder == "pad" and (number - 1) * padded >= total:
        with pytest.raises(ValueError, match="minibatches without a row") as error:
            plan(KEY, num_steps=total, num_envs=1, num_mini_batch=number, remainder="pad")
        number = int(str(error.value).rsplit("Use ", 1)[1].rstrip("."))
    size = {"num_mini_batch": number} if by_count else {"mini_batch_size": number}
    p = plan(None, num_steps=total, num_envs=1, shuffle=False, remainder=remainder, **size)
    assert p.indices.shape[0 if by_count else 1] == number
    weights, indices = np.asarray(p.weights), np.asarray(p.indices)
    assert (weights.sum(1) > 0).all()
    counted = indices[weights > 0].tolist()
    assert counted == list(range(len(counted)))
    if remainder == "pad":
        assert len(counted) == total
    else:
        assert (weights == 1).all()
        assert total - len(counted) < (p.indices.shape[0] if by_count else number)
    assert ((indices >= 0) & (indices < total)).all()


def test_dropped_rows_differ_between_epochs():
    p = plan(KEY, num_steps=10, num_envs=1, mini_batch_size=8, num_epochs=30, remainder="drop")
    assert set(p.indices.ravel().tolist()) == set(range(10))


# By sequence.


def test_rows_of_steps_sequences_and_environments():
    steps = jnp.arange(24).reshape(6, 4)  # t·4 + b
    tree = {"a": steps, "b": jnp.stack([steps, -steps], -1)}
    p = plan(None, num_steps=6, num_envs=4, mini_batch_size=4, shuffle=False)
    row = jax.tree.map(lambda x: x[1], p)
    assert take(tree, row)["a"].tolist() == [4, 5, 6, 7]
    assert take(tree, row)["b"].shape == (4, 2)
    p = plan(None, num_steps=6, num_envs=4, mini_batch_size=2, shuffle=False, by="sequence",
             sequence_length=3)  # fmt: skip
    assert p.indices.shape == (4, 2)
    row = jax.tree.map(lambda x: x[3], p)  # the second chunk of environments 2 and 3
    assert take(tree, row)["a"].tolist() == [[14, 15], [18, 19], [22, 23]]
    p = plan(KEY, num_steps=6, num_envs=4, num_mini_batch=2, by="environment")
    for i in range(2):
        row = jax.tree.map(lambda x, i=i: x[i], p)
        np.testing.assert_array_equal(take(tree, row)["a"], np.asarray(steps)[:, row.indices])


@pytest.mark.parametrize(("by", "length"), [("step", None), ("sequence", 2), ("environment", None)])
def test_a_scanned_plan_takes_every_step_once(by, length):
    steps = jnp.arange(24).reshape(6, 4)

    @jax.jit
    def run(key):
        p = plan(key, num_steps=6, num_envs=4, num_mini_batch=2, by=by, sequence_length=length)
        return jax.lax.scan(lambda c, row: (c, take(steps, row)), 0, p)[1]

    assert sorted(run(KEY).ravel().tolist()) == list(range(24))


def test_a_plan_scans_keeps_dtypes_and_vmaps_over_keys():
    keys = jax.random.split(KEY, 3)
    plans = jax.vmap(lambda k: plan(k, num_steps=4, num_envs=2, num_mini_batch=2))(keys)
    assert plans.indices.shape == (3, 2, 4)
    one = plan(keys[1], num_steps=4, num_envs=2, num_mini_batch=2)
    np.testing.assert_array_equal(plans.indices[1], one.indices)
    pixels = jnp.zeros((4, 2, 3), jnp.uint8)
    assert take(pixels, MinibatchPlan(one.indices[0], one.weights[0])).dtype == jnp.uint8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_mini_batch": 0}, r"num_mini_batch must be at least 1, got 0"),
        ({"mini_batch_size": 25}, r"mini_batch_size must divide .* = 24, got 25\. Use 24"),
        ({"num_epochs": 0}, r"num_epochs must be at least 1, got 0"),
        ({"key": None}, r"shuffle=True needs a key.*shuffle=False"),
        ({"by": "row"}, r"by must be .*got 'row'"),
        ({"remainder": "keep"}, r"remainder must be .*got 'keep'"),
        ({"by": "sequence"}, r'by="sequence" needs sequence_length'),
        ({"by": "sequence", "sequence_length": 4}, r"divide num_steps = 6, got 4. Use 3"),
        ({"by": "sequence", "sequence_length": 0}, r"sequence_length must be at least 1, got 0"),
        ({"by": "environment", "sequence_length": 3}, r'whole rollouts of 6.*by="sequence"'),
        ({"sequence_length": 3}, r'by="step" has no sequence_length, got 3'),
        (
            {"by": "sequence", "sequence_length": 3, "num_mini_batch": 3},
            r"num_mini_batch must divide num_steps / 3 \* num_envs = 2 \* 4 = 8, got 3\. Use 4",
        ),
    ],
)
def test_bad_plans_are_explained(options, message):
    options = {"key": KEY, **options}
    with pytest.raises(ValueError, match=message):
        plan(options.pop("key"), num_steps=6, num_envs=4, **options)
