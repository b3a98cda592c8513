"""Recurrent sequences with their carries, and streams of reward and value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from storage_data import add_all, assert_equal, step, trajectory

import jaxroll
from jaxroll import DecoupledRolloutStorage, RolloutStorage
from jaxroll.types import EpisodeSums, Rollout

T, B = 6, 4
KEY = jax.random.key(0)
DATA = trajectory(num_steps=T, num_envs=B)
# The carry before step t of environment b says which it is: 100·t + b.
CARRIES = {"h": (100.0 * np.arange(T)[:, None] + np.arange(B)[None]).astype(np.float32)}


def recurrent(length=None, data=DATA):
    return RolloutStorage.create(step(data), T, initial_carry=step(CARRIES), sequence_length=length)


@pytest.mark.parametrize("length", [None, 1, 2, 3, 6])
def test_the_carry_before_each_sequence_is_kept(length):
    every = CARRIES["h"][:: length or T]
    added = jax.jit(add_all)(recurrent(length), DATA, CARRIES)
    np.testing.assert_array_equal(added.initial_carry["h"], every)
    inserted = recurrent(length).insert_data_slice(DATA, {"h": every})
    assert_equal(added, jax.device_get(inserted))
    more = add_all(added, DATA, {"h": -CARRIES["h"]})
    np.testing.assert_array_equal(more.initial_carry["h"], every)


@pytest.mark.parametrize("length", [None, 2])
def test_minibatches_are_whole_sequences_with_their_first_carry(length):
    storage = jax.jit(add_all)(recurrent(length), DATA, CARRIES).before_gradients(np.zeros(B))
    size = length or T
    batches = storage.generate_batches(KEY, num_mini_batch=2)
    seen = []
    for batch in batches:
        number = np.asarray(batch.transition.extras["number"])
        assert number.shape == batch.weights.shape == (size, T * B // size // 2)
        assert (np.diff(number, axis=0) == B).all()
        t, b = number[0] // B, number[0] % B
        assert (t % size == 0).all()
        np.testing.assert_array_equal(batch.initial_carry["h"], 100 * t + b)
        seen += number.ravel().tolist()
    assert sorted(seen) == list(range(T * B))
    by_step = next(iter(storage.generate_batches(KEY, num_mini_batch=2, by="step")))
    assert by_step.initial_carry is None
    assert by_step.weights.shape == (T * B // 2,)


def test_padded_and_unwritten_sequences_weigh_nothing():
    part = jax.tree.map(lambda x: x[:3], (DATA, CARRIES))
    storage = add_all(recurrent(2), *part).before_gradients(np.zeros(B))
    batches = list(
        storage.generate_batches(None, mini_batch_size=5, shuffle=False, remainder="pad")
    )
    assert sum(float(b.weights.sum()) for b in batches) == 3 * B
    assert batches[-1].weights.shape == (2, 5)


def test_sequences_without_a_carry():
    storage = RolloutStorage.create(step(DATA), T, sequence_length=3).insert_data_slice(DATA)
    storage = storage.before_gradients(np.zeros(B))
    batch = next(iter(storage.generate_batches(KEY, num_mini_batch=2)))
    assert batch.weights.shape == (3, 4)
    assert batch.initial_carry is None
    batch = next(iter(storage.generate_batches(KEY, num_mini_batch=2, by="environment")))
    assert batch.weights.shape == (T, 2)


# Streams.


def two_streams(seed=0):
    one, two = trajectory(seed, T, B), trajectory(seed + 1, T, B)
    names = ("value", "reward", "bootstrap_value")
    return one.replace(
        **{n: {"extrinsic": getattr(one, n), "intrinsic": getattr(two, n)} for n in names}
    )


LAST = {"extrinsic": np.ones(B, np.float32), "intrinsic": np.full(B, -1.0, np.float32)}


@pytest.mark.parametrize("by_adding", [False, True])
def test_each_stream_has_its_own_numbers_and_intrinsic_ones_ignore_the_flags(by_adding):
    data = two_streams()
    storage = RolloutStorage.create(
        step(data),
        T,
        discount={"extrinsic": 0.9, "intrinsic": 0.5},
        gae_lambda=0.8,
        episodic={"extrinsic": True, "intrinsic": False},
    )
    storage = add_all(storage, data) if by_adding else storage.insert_data_slice(data)
    storage = storage.compute_returns_and_advantages(LAST).check()
    for name, flags, discount in (("extrinsic", True, 0.9), ("intrinsic", False, 0.5)):
        want = jaxroll.gae(
            data.reward[name],
            data.value[name],
            LAST[name],
            data.terminated if flags else None,
            data.truncated if flags else None,
            data.bootstrap_value[name] if flags else None,
            discount,
            0.8,
        )
        np.testing.assert_allclose(storage.targets.returns[name], want.returns, atol=1e-5)
        np.testing.assert_allclose(storage.targets.advantages[name], want.advantages, atol=1e-5)
    batch = storage.sample(KEY, num_mini_batch=2)
    assert batch.targets.returns["intrinsic"].shape == (2, 12)


def test_one_number_serves_all_streams_and_can_be_changed_for_all_or_each():
    data = two_streams(2)
    storage = RolloutStorage.create(step(data), T, discount=0.9, episodic=False)
    assert storage.discount == {"extrinsic": np.float32(0.9), "intrinsic": np.float32(0.9)}
    changed = storage.update_storage_parameter("discount", 0.5)
    assert changed.discount == {"extrinsic": np.float32(0.5), "intrinsic": np.float32(0.5)}
    changed = changed.update_storage_parameter("episodic", {"extrinsic": True, "intrinsic": False})
    assert jax.tree.structure(changed) == jax.tree.structure(storage)
    assert changed.episodic["extrinsic"].dtype == bool
    assert jnp.result_type(changed.discount["extrinsic"]) == jnp.float32


def test_a_single_stream_may_be_non_episodic_too():
    storage = RolloutStorage.create(step(DATA), T, discount=0.9, gae_lambda=0.8, episodic=False)
    storage = storage.insert_data_slice(DATA).compute_returns_and_advantages(LAST["extrinsic"])
    want = jaxroll.gae(DATA.reward, DATA.value, LAST["extrinsic"], None, None, None, 0.9, 0.8)
    np.testing.assert_allclose(storage.targets.returns, want.returns, atol=1e-5)
    again = storage.update_storage_parameter("episodic", True)
    again = again.compute_returns_and_advantages(LAST["extrinsic"])
    assert not np.allclose(again.targets.returns, want.returns)


@pytest.mark.parametrize("num_sequences", [0, 1, 2])
@pytest.mark.parametrize("kind", [RolloutStorage, DecoupledRolloutStorage])
def test_a_storage_from_a_rollout_equals_one_filled_by_hand(kind, num_sequences):
    steps = 4
    data = trajectory(num_steps=steps, extras={"adv_pred": np.ones((steps, 3), np.float32)})
    carries = np.arange(num_sequences * 6, dtype=np.float32).reshape(num_sequences, 3, 2)
    last = np.ones(3, np.float32)
    rollout = Rollout(
        transition=data,
        last_obs=step(data.obs),
        last_is_first=np.zeros(3, bool),
        last_carry=(),
        last_value=last,
        initial_carry=carries if num_sequences else (),
        final=None,
        episodes=EpisodeSums(0, 0.0, 0.0),
    )
    got = kind.from_rollout(rollout, discount=0.5)
    carry = np.zeros((3, 2), np.float32) if num_sequences else None
    length = 2 if num_sequences == 2 else None
    want = kind.create(step(data), steps, discount=0.5, initial_carry=carry, sequence_length=length)
    want = want.insert_data_slice(data, carries if num_sequences else None)
    assert_equal(got, want.compute_returns_and_advantages(last))
    with pytest.raises(TypeError, match=r"must be of type Rollout, got Transition"):
        kind.from_rollout(data)
