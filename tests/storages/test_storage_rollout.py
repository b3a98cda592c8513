"""RolloutStorage: writing, targets, sampling, moving on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from storage_data import add_all, assert_equal, avals, step, trajectory

import jaxroll
from jaxroll import DecoupledRolloutStorage, RolloutStorage, Transition

T, B = 5, 3
DATA = trajectory(num_steps=T, num_envs=B)
LAST = np.array([0.5, -1.0, 2.0], np.float32)
KEY = jax.random.key(0)


def create(data=DATA, num_steps=T, **options):
    return RolloutStorage.create(step(data), num_steps, **options)


def ready(data=DATA, **options):
    storage = create(data, len(data.terminated), **options).insert_data_slice(data)
    return storage.compute_returns_and_advantages(LAST)


# Writing.


def test_adding_each_step_equals_inserting_the_slice():
    added = jax.jit(add_all)(create(), DATA)
    assert_equal(added, jax.jit(lambda s: s.insert_data_slice(DATA))(create()))
    eager = create()
    for t in range(T):
        assert not eager.is_full
        eager = eager.insert_transition(step(DATA, t))
    assert eager.is_full
    assert_equal(added, eager)
    assert_equal(added.data, DATA)


def test_adds_past_the_end_write_nothing_and_are_counted():
    storage = add_all(create(), DATA)
    more = add_all(storage, trajectory(1))
    assert_equal(more.data, DATA)
    assert int(more.dropped) == T
    assert int(more.position) == T
    with pytest.raises(ValueError, match=r"5 steps were added past the end.*num_steps = 5"):
        more.check()
    assert int(more.update().dropped) == T
    assert int(more.reset().dropped) == 0


def test_dtypes_are_kept_as_given():
    data = DATA.replace(
        value=jnp.asarray(DATA.value, jnp.bfloat16),
        reward=DATA.reward.astype(np.float16),
        extras={"key": jax.random.split(KEY, (T, B))},
    )
    storage = create(data).insert_data_slice(data).compute_returns_and_advantages(LAST)
    assert storage.data.obs["pixels"].dtype == jnp.uint8
    assert storage.data.action.dtype == jnp.int32
    assert storage.data.reward.dtype == jnp.float16
    assert storage.targets.advantages.dtype == jnp.bfloat16
    assert storage.data.extras["key"].dtype == KEY.dtype
    assert storage.nbytes > 0


def test_no_verb_changes_structure_shapes_or_dtypes():
    storage = create()
    verbs = {
        "add": lambda s: s.add(step(DATA)),
        "insert": lambda s: s.insert_data_slice(DATA),
        "insert fewer": lambda s: s.insert_data_slice(jax.tree.map(lambda x: x[:2], DATA)),
        "targets": lambda s: s.compute_returns_and_advantages(LAST),
        "before": lambda s: s.before_gradients(LAST),
        "after": lambda s: s.after_gradients({})[0],
        "update": lambda s: s.update(),
        "reset": lambda s: s.reset(),
        "parameter": lambda s: s.update_storage_parameter("discount", 0.5),
        "float64": lambda s: s.update_storage_parameter("discount", np.asarray(0.5)),
        "replace": lambda s: s.replace(discount=1, gae_lambda=0.5),
    }
    for name, verb in verbs.items():
        assert avals(jax.eval_shape(verb, storage)) == avals(storage), name
    jax.lax.scan(lambda s, _: (s.update().add(step(DATA)), None), storage, length=2)


# Targets.


@pytest.mark.parametrize("valid", [False, True])
def test_targets_are_those_of_gae(valid):
    data = trajectory(2, valid=valid)
    want = jaxroll.gae(
        data.reward, data.value, LAST, data.terminated, data.truncated, data.bootstrap_value,
        0.9, 0.8, valid=data.valid,
    )  # fmt: skip
    got = ready(data, discount=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(got.targets.returns, want.returns, atol=1e-6)
    np.testing.assert_allclose(got.targets.advantages, want.advantages, atol=1e-6)
    added = jax.jit(lambda s: add_all(s, data).compute_returns_and_advantages(LAST))
    storage = added(create(data, discount=0.9, gae_lambda=0.8))
    np.testing.assert_allclose(storage.targets.returns, want.returns, atol=1e-6)


@pytest.mark.parametrize("written", [1, 3, 5])
def test_in_a_partial_rollout_last_values_stand_after_the_last_written_row(written):
    """Stale rows of an earlier rollout, NaN included, have no effect."""
    stale = jax.tree.map(
        lambda x: np.full_like(x, np.nan) if x.dtype == np.float32 else np.ones_like(x), DATA
    )
    part = jax.tree.map(lambda x: x[:written], DATA)
    storage = create().insert_data_slice(stale).update()
    whole = create(part, written).insert_data_slice(part).compute_returns_and_advantages(LAST)
    by_adding = add_all(storage, part)
    at_once = storage.insert_data_slice(part)
    for s in (by_adding, at_once):
        s = s.compute_returns_and_advantages(LAST).check(partial=True)
        got = jax.tree.map(lambda x: x[:written], s.targets)
        np.testing.assert_allclose(got.returns, whole.targets.returns, atol=1e-6)
        np.testing.assert_allclose(got.advantages, whole.targets.advantages, atol=1e-6)
        weights = s.sample(KEY, num_mini_batch=1).weights
        assert int(weights.sum()) == written * B
        kept = s.get_all_buffer_data(data_to_cpu=True)
        assert (kept.weights == (np.arange(T) < written)[:, None]).all()


def test_one_compilation_for_all_discounts_by_vmap():
    storage = create().insert_data_slice(DATA)
    traces = []

    def returns(g):
        traces.append(g)
        return storage.replace(discount=g).compute_returns_and_advantages(LAST).targets.returns

    both = jax.vmap(returns)(jnp.array([0.9, 0.99]))
    assert both.shape == (2, T, B)
    assert len(traces) == 1
    np.testing.assert_allclose(both[0], returns(jnp.float32(0.9)), atol=1e-6)


# Sampling.


def test_a_sample_is_a_permutation_of_all_elements():
    storage = ready()
    batch = jax.jit(lambda s, k: s.sample(k, num_mini_batch=3))(storage, KEY)
    assert batch.transition.obs["pixels"].shape == (3, 5, 2, 2)
    assert batch.initial_carry is None
    number = np.asarray(batch.transition.extras["number"]).ravel()
    assert sorted(number) == list(range(T * B))
    assert number.tolist() != list(range(T * B))

    def flat(x):
        return np.asarray(x).reshape(T * B, *x.shape[2:])[number]

    for got, all_rows in (
        (batch.transition, storage.data),
        (batch.targets, storage.targets),
    ):
        assert_equal(
            jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), got),
            jax.tree.map(flat, all_rows),
        )
    assert (batch.weights == 1).all()
    again = storage.sample(jax.random.key(1), num_mini_batch=3)
    assert again.transition.extras["number"].ravel().tolist() != number.tolist()


def test_weights_are_zero_for_invalid_and_padded_rows():
    data = trajectory(3, valid=True)
    batches = list(
        ready(data).generate_batches(
            None, mini_batch_size=4, shuffle=False, num_epochs=2, remainder="pad"
        )
    )
    assert len(batches) == 8
    weights = np.concatenate([b.weights for b in batches[:4]])
    np.testing.assert_array_equal(weights[:15], data.valid.ravel())
    assert weights[15] == 0


def test_batches_iterate_in_python_and_scan_inside_jit_alike():
    storage = ready()
    options = {"num_mini_batch": 3, "num_epochs": 2}
    batches = storage.generate_batches(KEY, **options)
    python = [b.transition.extras["number"] for b in batches]

    @jax.jit
    def scanned(storage, key):
        def body(count, batch):
            return count + 1, batch.transition.extras["number"]

        return storage.generate_batches(key, **options).scan(body, 0)

    count, numbers = scanned(storage, KEY)
    assert int(count) == len(batches) == 6
    np.testing.assert_array_equal(numbers, np.stack(python))
    np.testing.assert_array_equal(batches.stacked().transition.extras["number"], numbers)
    for epoch in np.asarray(numbers).reshape(2, -1):
        assert sorted(epoch) == list(range(T * B))


def test_all_data_can_be_read_without_changing_the_storage():
    storage = ready()
    host = storage.get_all_buffer_data(data_to_cpu=True)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(host))
    assert_equal(host.transition, DATA)
    device = storage.get_all_buffer_data()
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves((device, storage.data)))


# Moving on.


def test_update_empties_and_after_gradients_extends_the_info():
    storage = ready()
    info = {"loss": 1.0}
    moved, extended = storage.after_gradients(info)
    assert info == {"loss": 1.0}
    assert extended.keys() == {"loss", "storage_dropped"}
    assert int(moved.position) == 0
    assert not moved.has_targets
    assert_equal(add_all(moved, DATA).data, DATA)


def test_check_tells_what_is_missing():
    storage = create()
    with pytest.raises(ValueError, match=r"0 of 5 steps are written.*check\(partial=True\)"):
        storage.check()
    storage = storage.insert_data_slice(DATA)
    with pytest.raises(ValueError, match=r"no targets.*compute_returns_and_advantages"):
        storage.check()
    done = storage.compute_returns_and_advantages(LAST)
    assert done.check() is done
    with pytest.raises(ValueError, match="no targets"):
        done.update().add(step(DATA)).check(partial=True)
    reward = DATA.reward.copy()
    reward[2, 1] = np.nan
    bad = ready(DATA.replace(reward=reward))
    with pytest.raises(ValueError, match=r"reward is not finite in 1 rows.*step 2 of env.* 1"):
        bad.check()
    with pytest.raises(ValueError, match=r"targets.advantages is not finite"):
        storage.compute_returns_and_advantages(LAST * np.nan).check()
    unread = np.where(DATA.truncated & ~DATA.terminated, DATA.bootstrap_value, np.nan)
    ready(DATA.replace(bootstrap_value=unread)).check()


def without_targets():
    added = create()
    for t in range(T):
        added = added.add(step(DATA, t))
    return {
        "empty": create(),
        "inserted": create().insert_data_slice(DATA),
        "added": added,
        "added after": jax.jit(lambda s: s.update().add(step(DATA)))(ready()),
        "discount replaced": ready().replace(discount=0.5),
        "lambda changed": jax.jit(lambda s: s.update_storage_parameter("gae_lambda", 0.1))(ready()),
    }


@pytest.mark.parametrize("name", without_targets())
def test_sampling_without_targets_raises_and_inside_jit_weighs_nothing(name):
    storage = without_targets()[name]
    plan = jax.tree.map(lambda x: x[0], storage.plan(KEY))
    for sample in (
        lambda s: s.sample(KEY, 1),
        lambda s: next(iter(s.generate_batches(KEY))),
        lambda s: s.minibatch(plan),
        lambda s: s.check(partial=True),
    ):
        with pytest.raises(
            ValueError, match=r"no targets for what.* discount, gae_lambda, .*Call storage ="
        ):
            sample(storage)
    assert not jax.jit(lambda s: s.sample(KEY, 1))(storage).weights.any()
    again = storage.before_gradients(LAST)
    weights = jax.jit(lambda s: s.sample(KEY, 1))(again).weights
    assert weights.sum() == int(again.position) * B


def test_nan_in_an_invalid_row_is_no_fault():
    data = trajectory(4, valid=True)
    data = data.replace(reward=np.where(data.valid, data.reward, np.nan))
    ready(data).check()


# The decoupled form.


def test_decoupled_storage_samples_each_side_on_its_own():
    data = DATA.replace(extras={"adv_pred": DATA.value, "number": DATA.extras["number"]})
    make = DecoupledRolloutStorage.create_factory(num_steps=T, discount=0.9, gae_lambda=0.8)
    storage = make(step(data)).insert_data_slice(data).before_gradients(LAST)
    assert isinstance(storage, DecoupledRolloutStorage)
    np.testing.assert_allclose(
        storage.targets.returns, ready(discount=0.9, gae_lambda=0.8).targets.returns
    )
    policy = storage.sample_policy(KEY, num_mini_batch=3)
    value = storage.sample_value(KEY, num_mini_batch=5)
    assert sorted(policy.transition.extras["number"].ravel().tolist()) == list(range(T * B))
    assert policy.transition.extras["adv_pred"].shape == (3, 5)
    assert policy.transition.value is None
    assert policy.targets.returns is None
    assert value.targets.returns.shape == value.transition.value.shape == (5, 3)
    assert value.targets.advantages is None
    assert value.transition.action is None
    number = policy.transition.extras["number"]
    np.testing.assert_array_equal(
        policy.targets.advantages, storage.targets.advantages.ravel()[number]
    )
    storage.update_storage_parameter("gae_lambda", 0.5)


def test_an_example_needs_only_what_is_used():
    example = Transition(
        obs=np.zeros((1, 2)), action=np.zeros(1), reward=np.zeros(1), terminated=np.zeros(1, bool),
        value=np.zeros(1),
    )  # fmt: skip
    shapes = jax.eval_shape(lambda: example)
    storage = jax.eval_shape(lambda: RolloutStorage.create(shapes, 2))
    assert storage.data.obs.shape == (2, 1, 2)
