"""Storages inside programs: one compilation, no copies, a user's own loop and own storage."""

import re
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from storage_data import step, trajectory

import jaxroll
from jaxroll import Minibatch, RolloutStorage, Storage, Targets, Transition
from jaxroll.storages import add_donated
from jaxroll.storages.minibatches import plan, take
from jaxroll.types import as_leaf

KEY = jax.random.key(0)


# Compilations.


def test_one_compilation_while_numbers_data_and_storages_change():
    @jax.jit
    @chex.assert_max_traces(1)
    def update(storage, data, last_values, key):
        storage = storage.insert_data_slice(data).before_gradients(last_values)
        batch = storage.sample(key, num_mini_batch=3)
        return storage.after_gradients({})[0], batch.targets.returns.sum()

    data = trajectory()
    storage = RolloutStorage.create(step(data), 5)
    last = np.zeros(3, np.float32)
    storage, first = update(storage, data, last, KEY)
    storage, second = update(storage.replace(discount=0.5), trajectory(1), last, KEY)
    assert first != second
    for value in (1, 0.3, np.float64(0.2), jnp.float32(0.1), np.asarray(0.4, np.float64)):
        changed = storage.update_storage_parameter("gae_lambda", value)
        changed, _ = update(changed.replace(discount=value), data, last, KEY)
    other = RolloutStorage.create(step(trajectory(2)), 5, discount=0.1, gae_lambda=1)
    update(other, data, last, KEY)
    del changed


class Counting(RolloutStorage):
    traces: ClassVar[list[int]] = []

    def add(self, transition, carry=None):
        self.traces.append(1)
        return super().add(transition, carry)


def test_add_donated_is_traced_once():
    data = trajectory()
    for discount in (0.9, 1):
        storage = Counting.create(step(data), 5, discount=discount)
        for t in range(5):
            storage = add_donated(storage, step(data, t))
    assert int(storage.position) == 5
    assert len(Counting.traces) == 1


# Memory, with pixels: a full storage is 28.9 MB, a step 0.2 MB.


def pixels(num_envs=8):
    return Transition(
        obs=jnp.zeros((num_envs, 84, 84, 4), jnp.uint8),
        action=jnp.zeros(num_envs, jnp.int32),
        reward=jnp.zeros(num_envs),
        terminated=jnp.zeros(num_envs, bool),
        value=jnp.zeros(num_envs),
    )


STEP_BYTES = 8 * 84 * 84 * 4


def test_a_donated_add_writes_in_place():
    storage = jax.eval_shape(lambda: RolloutStorage.create(pixels(), 128))
    memory = add_donated.lower(storage, pixels()).compile().memory_analysis()
    assert storage.nbytes > 128 * STEP_BYTES
    assert memory.alias_size_in_bytes >= 128 * STEP_BYTES
    assert memory.temp_size_in_bytes < 2 * STEP_BYTES


def test_a_donated_ring_add_writes_in_place():
    def create():
        return jaxroll.DistributedStorage.create(pixels(), 16, num_storages=32, batch_size=8)

    unroll = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.stack([x] * 16), pixels()))
    ring = jax.eval_shape(create)
    memory = add_donated.lower(ring, unroll, pixels().obs).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * 16 * STEP_BYTES
    assert memory.temp_size_in_bytes < 2 * 16 * STEP_BYTES


def test_add_in_a_scan_copies_no_whole_storage():
    def collect(storage, obs):
        def body(storage, t):
            return storage.add(pixels().replace(obs=obs + t.astype(jnp.uint8))), None

        return jax.lax.scan(body, storage, jnp.arange(128))[0]

    storage = jax.eval_shape(lambda: RolloutStorage.create(pixels(), 128))
    compiled = jax.jit(collect, donate_argnums=0).lower(storage, pixels().obs).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 128 * STEP_BYTES
    assert memory.temp_size_in_bytes < 2 * STEP_BYTES
    assert not re.findall(r"u8\[128,8,84,84,4\]\S* copy\(", compiled.as_text())


def test_minibatches_of_a_plan_never_hold_the_shuffled_rollout():
    def epochs(storage, key):
        batches = storage.generate_batches(key, num_mini_batch=8, num_epochs=2)
        largest = jnp.zeros((), jnp.uint8)
        return batches.scan(lambda c, b: (c | b.transition.obs.max(), None), largest)

    storage = jax.eval_shape(lambda: RolloutStorage.create(pixels(), 128))
    memory = jax.jit(epochs).lower(storage, KEY).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 128 * STEP_BYTES / 4


def test_donated_storages_are_gone():
    storage = RolloutStorage.create(step(trajectory()), 5)
    add_donated(storage, step(trajectory()))
    assert storage.data.obs["pixels"].is_deleted()


# Reading it.


def test_repr_names_fields_shapes_dtypes_bytes_and_how_full_it_is():
    storage = RolloutStorage.create(step(trajectory()), 5)
    lines = repr(storage.add(step(trajectory()))).splitlines()
    assert lines[0] == f"RolloutStorage(1 of 5 steps, {storage.nbytes} B"
    assert "  data.obs.pixels: uint8[5, 3, 2, 2]" in lines
    assert "  discount: 0.99" in lines
    assert "  targets_at: -1" in lines
    arrays = 5 * 3 * (2 * 4 + 4 + 4 + 4 + 1 + 1 + 4 + 4 + 4 + 4 + 2 * 4)
    assert storage.nbytes == arrays + 3 * 4 + 2 * 4
    seen = []
    jax.jit(lambda s: seen.append(repr(s)))(storage)
    assert seen[0].startswith("RolloutStorage(? of 5 steps")
    assert repr(jax.eval_shape(lambda: storage)).startswith("RolloutStorage(? of 5 steps")
    axes = repr(jax.tree.map(lambda _: 0, storage)).splitlines()
    assert axes[0] == "RolloutStorage("
    assert "  data.reward: 0" in axes


# A loop of the user's own.


def test_a_storage_lives_in_a_users_own_jitted_loop():
    """The first example of the README, with a random walk for an environment."""
    num_envs = 4

    def value_fn(params, obs):
        return (obs * params[None]).sum(-1)

    class Actor(jaxroll.types.Node):
        obs: Any

    def my_env_step(params, actor, key):
        action = jax.random.bernoulli(key, 0.5, (num_envs,)).astype(jnp.int32)
        reward = action.astype(jnp.float32)
        transition = Transition(
            obs=actor.obs,
            action=action,
            reward=reward,
            terminated=jnp.abs(actor.obs[:, 0]) > 2,
            value=value_fn(params, actor.obs),
        )
        return Actor(jnp.tanh(actor.obs + 2.0 * action[:, None] - 1)), transition

    def my_sgd_step(params, batch):
        def loss(params):
            errors = value_fn(params, batch.transition.obs) - batch.targets.returns
            return (batch.weights * errors**2).sum() / batch.weights.sum()

        value, gradient = jax.value_and_grad(loss)(params)
        return params - 0.05 * gradient, value

    params, actor = jnp.zeros(2), Actor(jnp.zeros((num_envs, 2)))
    example_transition = my_env_step(params, actor, KEY)[1]
    storage = jaxroll.RolloutStorage.create(example_transition, num_steps=128, discount=0.99)

    @jax.jit
    @chex.assert_max_traces(1)
    def update(storage, params, actor, key):
        collect_key, sample_key = jax.random.split(key)

        def step(carry, key):
            storage, actor = carry
            actor, transition = my_env_step(params, actor, key)
            return (storage.add(transition), actor), None

        keys = jax.random.split(collect_key, storage.num_steps)
        (storage, actor), _ = jax.lax.scan(step, (storage, actor), keys)
        storage = storage.compute_returns_and_advantages(value_fn(params, actor.obs))
        batches = storage.sample(sample_key, num_mini_batch=4)
        params, losses = jax.lax.scan(my_sgd_step, params, batches)
        return storage.update(), params, actor, losses.mean()

    losses = []
    for i in range(4):
        storage, params, actor, loss = update(storage, params, actor, jax.random.fold_in(KEY, i))
        losses.append(float(loss))
    assert np.isfinite(losses).all()
    assert int(storage.dropped) == 0
    last_values = value_fn(params, actor.obs)
    returns = jax.vmap(
        lambda g: (
            storage.replace(discount=g).compute_returns_and_advantages(last_values).targets.returns
        )
    )(jnp.array([0.9, 0.99]))
    assert returns.shape == (2, 128, num_envs)


# A storage of the user's own.


class MonteCarlo(Storage):
    """Keeps rewards and observations only; its targets are discounted returns, no critic."""

    parameters: ClassVar[tuple[str, ...]] = ("discount",)

    obs: Any  # [T, B, ...]
    reward: Any  # [T, B]
    terminated: Any  # [T, B]
    returns: Any  # [T, B]
    position: Any
    discount: Any

    @classmethod
    def create(cls, example, num_steps, *, discount=0.99):
        rows = [
            jnp.zeros((num_steps, *x.shape), x.dtype)
            for x in (example.obs, example.reward, example.terminated, example.reward)
        ]
        return cls(*rows, position=as_leaf(0), discount=as_leaf(discount))

    def add(self, transition):
        def put(x, row):
            return jax.lax.dynamic_update_index_in_dim(x, jnp.asarray(row), self.position, 0)

        return self.replace(
            obs=put(self.obs, transition.obs),
            reward=put(self.reward, transition.reward),
            terminated=put(self.terminated, transition.terminated),
            position=self.position + 1,
        )

    def insert_data_slice(self, trajectory, initial_carry=None):
        return self.replace(
            obs=jnp.asarray(trajectory.obs),
            reward=jnp.asarray(trajectory.reward),
            terminated=jnp.asarray(trajectory.terminated),
            position=as_leaf(len(trajectory.reward)),
        )

    def before_gradients(self, last_values):
        returns = jaxroll.discounted_returns(
            self.reward, last_values, self.terminated, None, None, self.discount
        )
        return self.replace(returns=returns)

    def plan(self, key, **options):
        num_steps, num_envs = self.reward.shape
        options.pop("by", None)
        return plan(key, num_steps=num_steps, num_envs=num_envs, **options)

    def minibatch(self, row):
        obs, reward, terminated, returns = take(
            (self.obs, self.reward, self.terminated, self.returns), row
        )
        step = Transition(obs=obs, action=None, reward=reward, terminated=terminated)
        return Minibatch(step, Targets(returns, returns), row.weights)

    def contents(self):
        return self.reward

    def update(self):
        return self.replace(position=jnp.zeros_like(self.position))

    def check(self):
        return self

    @property
    def fill(self):
        return self.position, self.reward.shape[0], "steps"


@pytest.mark.parametrize("kind", [MonteCarlo, RolloutStorage])
@pytest.mark.parametrize("by_adding", [False, True])
def test_a_users_storage_plugs_into_the_same_training_step(kind, by_adding):
    data = trajectory(num_steps=4, num_envs=3, truncation=False).replace(
        obs=np.ones((4, 3, 2), np.float32), value=np.zeros((4, 3), np.float32)
    )

    @jax.jit
    def train_step(storage, data, params, key):
        if by_adding:
            storage = jax.lax.scan(lambda s, x: (s.add(x), None), storage, data)[0]
        else:
            storage = storage.insert_data_slice(data)
        storage = storage.before_gradients(jnp.zeros(3))

        def sgd(params, batch):
            def loss(w):
                errors = (batch.transition.obs * w[None]).sum(-1) - batch.targets.returns
                return (batch.weights * errors**2).sum() / batch.weights.sum()

            return params - 0.1 * jax.grad(loss)(params), None

        batches = storage.generate_batches(key, num_mini_batch=2, num_epochs=3)
        params, _ = batches.scan(sgd, params)
        return *storage.after_gradients({"updates": len(batches)}), params

    example = step(data)
    options = {"gae_lambda": 1.0} if kind is RolloutStorage else {}
    storage = kind.create_factory(num_steps=4, discount=0.5, **options)(example)
    assert isinstance(storage, Storage)
    moved, info, params = train_step(storage, data, jnp.zeros(2), KEY)
    assert info["updates"] == 6
    assert int(moved.position) == 0
    changed = storage.update_storage_parameter("discount", 0.0)
    assert not np.allclose(train_step(changed, data, jnp.zeros(2), KEY)[2], params)
    assert repr(moved).startswith(f"{kind.__name__}(0 of 4 steps")
    # With λ = 1, values of 0 and the same key, both storages mean the same targets.
    returns = jaxroll.discounted_returns(
        data.reward, jnp.zeros(3), data.terminated, None, None, 0.5
    )
    got = storage.insert_data_slice(data).before_gradients(jnp.zeros(3))
    batch = next(iter(got.generate_batches(shuffle=False)))
    np.testing.assert_allclose(batch.targets.returns, returns.ravel(), atol=1e-6)


def test_an_unfinished_storage_cannot_be_created():
    class Unfinished(Storage):
        position: Any

    with pytest.raises(TypeError, match="abstract"):
        Unfinished(position=as_leaf(0))
    with pytest.raises(TypeError, match="abstract"):
        Storage()


def test_a_storage_without_counters_resets_and_names_no_parameters():
    data = trajectory(num_steps=4, num_envs=3)
    storage = MonteCarlo.create(step(data.replace(obs=data.value)), 4)
    assert int(storage.add(step(data.replace(obs=data.value))).reset().position) == 0
    with pytest.raises(ValueError, match=r"MonteCarlo has no parameter 'gamma'; it has discount"):
        storage.update_storage_parameter("gamma", 1)
    with pytest.raises(TypeError, match=r"no option 'lam'; it has num_steps, discount"):
        MonteCarlo.create_factory(lam=1)
