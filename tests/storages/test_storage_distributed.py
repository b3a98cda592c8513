"""DistributedStorage: first in, first out, each unroll once, what does not fit is counted."""

import functools
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from storage_data import assert_equal, avals, step, trajectory

from jaxroll import DistributedStorage
from jaxroll.storages import Unrolls, add_donated

T, B, K, BATCH = 4, 2, 12, 3
DATA = trajectory(num_steps=T, num_envs=B)


def create(**options):
    options = {"num_storages": K, "batch_size": BATCH, **options}
    return DistributedStorage.create(step(DATA), T, **options)


def unroll(number, num_envs=B):
    """An unroll whose every element tells its own number: number·B + b."""
    mark = number * num_envs + np.arange(num_envs)
    data = trajectory(num_steps=T, num_envs=num_envs)
    return data.replace(extras={"number": np.tile(mark, (T, 1)).astype(np.int32)})


@functools.cache
def compiled(num_envs, num_storages, batch_size):
    example = step(trajectory(num_steps=T, num_envs=num_envs))
    ring = DistributedStorage.create(example, T, num_storages=num_storages, batch_size=batch_size)

    def add(ring, number):
        mark = number * num_envs + jnp.arange(num_envs)
        data = unroll(0, num_envs)
        data = data.replace(extras={"number": jnp.tile(mark, (T, 1)).astype(jnp.int32)})
        return ring.add(data, step(data.obs), version=number)

    @jax.jit
    def everything(ring):
        batch = ring.sample()
        plan_batch = ring.minibatch(jax.tree.map(lambda x: x[0], ring.plan()))
        return batch, plan_batch, ring.lag(100), ring.can_add, ring.can_sample, ring.contents()

    return ring, jax.jit(add), everything, jax.jit(lambda ring: ring.update())


@pytest.mark.parametrize("sizes", [(2, 12, 3), (1, 3, 3), (4, 8, 2)])
@settings(max_examples=20, deadline=None)
@given(verbs=st.lists(st.sampled_from(["add", "add", "take"]), max_size=30))
def test_any_sequence_of_verbs_equals_a_queue(sizes, verbs):
    num_envs, capacity, batch_size = sizes
    ring, add, everything, update = compiled(*sizes)
    queue, dropped = deque(), 0
    for number, verb in enumerate(verbs):
        if verb == "add":
            ring = add(ring, number)
            new = [number * num_envs + b for b in range(num_envs)]
            if len(queue) + num_envs <= capacity:
                queue.extend(new)
            else:
                dropped += num_envs
        else:
            batch, _, lag, _, can_sample, _ = everything(ring)
            assert bool(can_sample) == (len(queue) >= batch_size)
            assert (np.asarray(batch.weights) == float(can_sample)).all()
            ring = update(ring)
            if can_sample:
                oldest = [queue.popleft() for _ in range(batch_size)]
                got = batch.transition.extras["number"]
                assert got.shape == (T, batch_size)
                assert (np.asarray(got) == oldest).all()
                assert batch.version.tolist() == [n // num_envs for n in oldest]
                assert lag.tolist() == [100 - n // num_envs for n in oldest]
    _, in_order, _, can_add, _, contents = everything(ring)
    assert int(ring.num_full) == len(queue)
    assert int(ring.dropped) == dropped
    assert bool(can_add) == (len(queue) + num_envs <= capacity)
    waiting = np.asarray(contents.transition.extras["number"])[0][np.asarray(contents.weights) > 0]
    assert sorted(waiting) == list(queue)
    ready = list(queue)[:batch_size]
    assert np.asarray(in_order.weights).sum() == len(ready)
    assert np.asarray(in_order.transition.extras["number"])[0][: len(ready)].tolist() == ready


def test_a_batch_has_everything_that_was_added():
    carry = {"h": np.arange(B, dtype=np.float32)}
    ring = create(batch_size=B, initial_carry=carry, max_truncations=2)
    final_obs = jax.tree.map(lambda x: np.stack([x[1], x[2]]), DATA.obs)
    final_step = np.array([[1, T], [3, T]], np.int32)
    ring = ring.add(
        DATA,
        step(DATA.obs, -1),
        carry,
        np.array([7, 8]),
        last_is_first=np.array([True, False]),
        final_obs=final_obs,
        final_step=final_step,
        overflow=3,
    )
    want = Unrolls(
        transition=DATA,
        last_obs=step(DATA.obs, -1),
        last_is_first=np.array([True, False]),
        initial_carry=carry,
        final_obs=final_obs,
        final_step=final_step,
        version=np.array([7, 8], np.int32),
        weights=np.ones(B, np.float32),
    )
    assert_equal(ring.sample(), want)
    again = create(batch_size=B, initial_carry=carry, max_truncations=2).insert_data_slice(want)
    assert_equal(again.sample(), want)
    assert {k: int(v) for k, v in ring.counters().items()} == {
        "storage_dropped": 0,
        "storage_overflow": 3,
    }
    moved, info = ring.after_gradients({"loss": 0.0})
    assert int(moved.num_full) == 0
    assert int(info["storage_overflow"]) == 3
    assert all(int(x) == 0 for x in jax.tree.leaves(moved.reset().counters()))


def test_without_final_observations_every_truncation_is_counted_and_ends_are_found():
    flags = np.zeros((2, T, B), bool)
    flags[:, 1, 0], flags[1, 2, 0], flags[1, 3, 1] = True, True, True  # both, and two cut short
    data = DATA.replace(terminated=flags[0], truncated=flags[1])
    ring = create().add(data, step(DATA.obs))
    assert int(ring.counters()["storage_overflow"]) == 2
    slots = ring.contents()
    assert (slots.final_step[:, :B] == T).all()
    assert slots.last_is_first[:B].tolist() == [False, True]


def test_slots_of_weight_0_stay_so_when_inserted_again():
    empty = create()
    again = empty.insert_data_slice(empty.sample())
    assert int(again.num_full) == int(again.dropped) == 0
    assert not again.contents().weights.any()
    one = create().add(unroll(5), step(DATA.obs))
    half = one.contents()
    half = half.replace(weights=half.weights.at[1].set(0.0))
    stored = create().insert_data_slice(half)
    assert stored.contents().weights.tolist() == [1.0] + [0.0] * (K - 1)
    assert stored.add(unroll(6), step(DATA.obs)).sample().weights.tolist() == [1.0, 0.0, 1.0]
    row = jax.tree.map(lambda x: x[0], stored.plan())
    assert stored.minibatch(row).weights.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize("to_cpu", [False, True])
def test_everything_that_is_stored_can_be_inserted_again(transform, to_cpu):
    ring = create(num_storages=6, batch_size=2)
    for number in range(5):  # the last add wraps around
        ring = ring.add(unroll(number), step(DATA.obs), version=number)
        if number in (1, 2, 3):
            ring = ring.update()
    for _ in range(2):
        everything = ring.get_all_buffer_data(data_to_cpu=to_cpu)
        again = transform(lambda r, x: r.insert_data_slice(x))(
            create(num_storages=6, batch_size=2), everything
        )
        assert int(again.num_full) == int(ring.num_full)
        assert again.contents().weights.sum() == ring.contents().weights.sum()
        assert_equal(again.sample(), ring.sample())
        ring = ring.update()
    assert int(again.num_full) == 2


def test_no_verb_changes_structure_shapes_or_dtypes():
    ring = create()
    verbs = (
        lambda r: r.add(DATA, step(DATA.obs), version=3),
        lambda r: r.insert_data_slice(r.sample()),
        lambda r: r.update(),
        lambda r: r.reset(),
        lambda r: r.before_gradients(None),
        lambda r: r.after_gradients({})[0],
    )
    for verb in verbs:
        assert avals(jax.eval_shape(verb, ring)) == avals(ring)


def test_batches_come_in_order_and_only_full_ones_count():
    ring = create()
    for number in range(4):
        ring = add_donated(ring, unroll(number), step(DATA.obs), version=number)
    batches = list(ring.generate_batches(num_mini_batch=3))
    assert [b.transition.extras["number"][0].tolist() for b in batches[:2]] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    assert [b.weights.tolist() for b in batches] == [[1, 1, 1], [1, 1, 1], [1, 1, 0]]


def test_check_tells_what_is_wrong():
    ring = create()
    with pytest.raises(ValueError, match=r"0 unrolls are stored, fewer than batch_size = 3"):
        ring.check()
    add = jax.jit(lambda r, d: r.add(d, step(DATA.obs)))
    unread = np.where(DATA.truncated, DATA.bootstrap_value, np.nan)
    for _ in range(K // B):
        ring = add(ring, DATA.replace(bootstrap_value=unread))
    assert ring.check() is ring
    with pytest.raises(
        ValueError, match=r"2 unrolls found no free slot.*num_storages = 12 and 12 wait"
    ):
        add(ring, DATA.replace(bootstrap_value=unread)).check()
    bad = DATA.replace(reward=np.full_like(DATA.reward, np.inf))
    with pytest.raises(ValueError, match=r"reward is not finite in 8 rows, .* step 0 of unroll 6"):
        add(ring.update().update(), bad).check()


def test_repr_tells_how_full_it_is():
    text = repr(create().add(DATA, step(DATA.obs)))
    assert text.startswith("DistributedStorage(2 of 12 unrolls, ")
    assert "slots.transition.obs.pixels: uint8[4, 12, 2, 2]" in text
