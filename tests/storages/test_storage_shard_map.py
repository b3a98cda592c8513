"""Storages in a user's own `jax.shard_map`: made there, carried by scans, with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from storage_data import assert_equal, step, trajectory

from jaxroll import DecoupledRolloutStorage, DistributedStorage, RolloutStorage

T, B, D = 4, 3, 2
DATA = [
    trajectory(seed, T, B, extras={"adv_pred": np.full((T, B), seed, np.float32)})
    for seed in range(D)
]
SHARDS = jax.tree.map(lambda *x: np.stack(x), *DATA)


def on_devices(function, check_vma):
    """The function of each device's trajectory, stacked over devices."""
    mesh = jax.make_mesh((D,), ("actors",), axis_types=(AxisType.Auto,))
    local = lambda x: jax.tree.map(lambda y: y[None], function(step(x)))  # noqa: E731
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=P("actors"), out_specs=P("actors"), check_vma=check_vma
        )
    )(SHARDS)


def assert_like_one_device(function, check_vma):
    alone = [jax.jit(function)(data) for data in DATA]
    stacked = jax.tree.map(lambda *x: np.stack(x), *alone)
    assert_equal(jax.tree.map(np.asarray, on_devices(function, check_vma)), stacked)


def constants(data):
    """The same with flags that are known, as of an environment without ends."""
    return data.replace(terminated=jnp.zeros_like(data.terminated))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("kind", [RolloutStorage, DecoupledRolloutStorage])
def test_rollout_storage_is_a_scan_carry(kind, recurrent, check_vma):
    def function(data):
        carry = jnp.zeros((B, 2)) if recurrent else None
        storage = kind.create(step(data), T, initial_carry=carry)

        def add(storage, row):
            return storage.add(row, *([carry + row.value[:, None]] if recurrent else [])), None

        storage, _ = jax.lax.scan(add, storage, data)

        def learn(storage, key):
            storage = storage.compute_returns_and_advantages(jnp.ones(B))
            batch = storage.sample(key, 3)
            carries = storage.initial_carry
            storage = storage.update().insert_data_slice(constants(data), carries)
            storage = storage.before_gradients(data.value[-1])
            storage = storage.replace(discount=storage.discount * 0.5)
            return storage.add(step(data), *([carry] if recurrent else [])).reset(), batch

        return jax.lax.scan(learn, storage, jax.random.split(jax.random.key(0), 2))

    assert_like_one_device(function, check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
def test_constant_targets_and_trajectories_can_be_carried(check_vma):
    def function(data):
        storage = RolloutStorage.create(step(data), T)
        known = jax.tree.map(jnp.ones_like, DATA[0])

        def learn(storage, _):
            storage = storage.insert_data_slice(known)
            return storage.with_targets(jax.tree.map(jnp.ones_like, storage.targets)), None

        return jax.lax.scan(learn, storage, length=2)[0]

    assert_like_one_device(function, check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
def test_counters_that_differ_by_device_stay_so(check_vma):
    """As of a storage that was passed in with a leading axis of devices."""

    def function(data):
        storage = RolloutStorage.create(step(data), T)
        started = data.value[0, 0] > 0
        started = jnp.int32(started)
        storage = storage.replace(added=started, lost=started, targets_at=-started)

        def learn(storage, _):
            storage = storage.add(step(data)).insert_data_slice(data)
            return storage.compute_returns_and_advantages(data.value[-1]), None

        return jax.lax.scan(learn, storage, length=2)[0]

    assert_like_one_device(function, check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("recurrent", [False, True])
def test_ring_is_a_scan_carry(recurrent, check_vma):
    def function(data):
        carry = jnp.zeros((B, 2)) if recurrent else None
        ring = DistributedStorage.create(
            step(data), T, num_storages=12, batch_size=2, initial_carry=carry
        )

        def learn(ring, version):
            last = jax.tree.map(jnp.zeros_like, step(data.obs))
            ring = ring.add(constants(data), last, carry, version).add(data, last, carry, 7)
            batch = ring.sample()
            ring = ring.update().insert_data_slice(batch)
            batches = ring.generate_batches(num_mini_batch=2).stacked()
            return ring.before_gradients().update(), (batch, batches, ring.lag(version))

        ring, out = jax.lax.scan(learn, ring, jnp.arange(2))
        ring, _ = jax.lax.scan(lambda ring, _: (ring.reset(), None), ring, length=1)
        return ring, out

    assert_like_one_device(function, check_vma)
