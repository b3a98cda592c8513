"""What a shape, dtype or name decides raises when traced, and says what to write instead."""

import jax
import numpy as np
import pytest
from storage_data import step, trajectory

from jaxroll import DecoupledRolloutStorage, DistributedStorage, RolloutStorage

DATA = trajectory()
LAST = np.zeros(3, np.float32)
KEY = jax.random.key(0)


def create():
    return RolloutStorage.create(step(DATA), 5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"reward": np.zeros(4, np.float32)},
            ValueError,
            r"reward must have the shape \[3\], got \[4\]",
        ),
        (
            {"action": np.zeros(3, np.float32)},
            TypeError,
            r"action must be int32 .*astype\('int32'\)",
        ),
        ({"log_prob": None}, ValueError, r"(?s)structure of the example.*log_prob.*Leave out"),
        ({"extras": None}, ValueError, r"(?s)structure of the example.*extras.number"),
    ],
)
def test_adding_something_unlike_the_example_is_explained(change, error, message):
    wrong = step(DATA).replace(**change)
    with pytest.raises(error, match=message):
        jax.eval_shape(create().add, wrong)
    with pytest.raises(
        error, match=message.replace(r"\[3\]", r"\[1, 3\]").replace(r"\[4\]", r"\[1, 4\]")
    ):
        create().insert_data_slice(jax.tree.map(lambda x: x[None], wrong))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda e: RolloutStorage.create({"obs": 0}, 4),
            TypeError,
            r"example must be of type Transition, got \{'obs': 0\}",
        ),
        (lambda e: RolloutStorage.create(e, 0), ValueError, "num_steps must be at least 1, got 0"),
        (lambda e: RolloutStorage.create(e.replace(value=None), 4), ValueError, "needs a value"),
        (
            lambda e: RolloutStorage.create(e.replace(action=np.zeros(7)), 4),
            ValueError,
            r"same axis B.*action \[7\]",
        ),
        (
            lambda e: RolloutStorage.create(step(e), 4),
            ValueError,
            r"x\[None\] for a single environment",
        ),
        (
            lambda e: RolloutStorage.create(e.replace(bootstrap_value=None), 4),
            ValueError,
            "truncated needs bootstrap_value",
        ),
        (
            lambda e: RolloutStorage.create(e.replace(reward=np.zeros((3, 2))), 4),
            ValueError,
            r"reward must have the shape \[3\] = \[B\]",
        ),
        (
            lambda e: RolloutStorage.create(e.replace(log_prob=np.zeros((3, 1))), 4),
            ValueError,
            r"log_prob must have the shape \[3\] = \[B\].*, got \[3, 1\]",
        ),
        (
            lambda e: DecoupledRolloutStorage.create(
                e.replace(extras={"adv_pred": np.zeros((3, 1))}), 4
            ),
            ValueError,
            r'extras\["adv_pred"\] must have the shape \[3\] = \[B\], got \[3, 1\]',
        ),
        (
            lambda e: RolloutStorage.create(e.replace(terminated=np.zeros(3)), 4),
            TypeError,
            r"terminated must be bool.*astype\(bool\)",
        ),
        (
            lambda e: RolloutStorage.create(e, 4, sequence_length=3),
            ValueError,
            r"divide num_steps = 4, got 3",
        ),
        (
            lambda e: RolloutStorage.create(e, 4, discount={"a": 1}),
            ValueError,
            r"discount must have the streams of value, a single one, got \['a'\]",
        ),
        (
            lambda e: create().insert_data_slice(trajectory(0, 6)),
            ValueError,
            "between 1 and num_steps = 5 steps, got 6",
        ),
        (lambda e: create().insert_data_slice([1]), TypeError, r"Transition, got \[1\]"),
        (
            lambda e: create().compute_returns_and_advantages(np.zeros((3, 1))),
            ValueError,
            r"last_values must have the shape \[3\].*\[3, 1\]",
        ),
        (
            lambda e: create().compute_returns_and_advantages({"a": LAST}),
            ValueError,
            r"streams of value, a single one, got \['a'\]",
        ),
        (
            lambda e: create().sample(KEY, num_mini_batch=4),
            ValueError,
            "num_mini_batch must divide",
        ),
        (
            lambda e: create().sample(4, KEY),
            TypeError,
            r"key comes first, got key=4. Write \(jax.random.key\(0\), num_mini_batch=4\)",
        ),
        (
            lambda e: create().generate_batches(4, KEY),
            TypeError,
            r"key comes first, got key=4. Write \(jax.random.key\(0\), num_mini_batch=4\)",
        ),
        (lambda e: create().add(e, carry=np.zeros(3)), ValueError, "created with: nothing"),
        (
            lambda e: create().update_storage_parameter("discont", 1),
            ValueError,
            "has discount, gae_lambda, episodic. Did you mean 'discount'",
        ),
        (
            lambda e: create().update_storage_parameter("episodic", False),
            ValueError,
            "Give episodic to create",
        ),
        (
            lambda e: create().update_storage_parameter("discount", {"a": 1}),
            ValueError,
            r"streams of value, a single one, got \['a'\]",
        ),
        (
            lambda e: RolloutStorage.create_factory(num_step=4),
            TypeError,
            "no option 'num_step'.*Did you mean 'num_steps'",
        ),
        (
            lambda e: DecoupledRolloutStorage.create(e, 4),
            ValueError,
            r'needs extras\["adv_pred"\].*number',
        ),
    ],
)
def test_bad_input_is_explained(make, error, message):
    with pytest.raises(error, match=message):
        make(step(DATA))


def streams(**changes):
    both = {"a": np.zeros(3), "b": np.zeros(3)}
    example = step(DATA).replace(value=both, reward=both, bootstrap_value=both)
    return example.replace(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RolloutStorage.create(streams(reward=np.zeros(3)), 5),
            r"reward must have the streams of value, \['a', 'b'\], got a single one",
        ),
        (
            lambda: RolloutStorage.create(streams(bootstrap_value={"a": np.zeros(3)}), 5),
            r"bootstrap_value must .* got \['a'\]",
        ),
        (
            lambda: RolloutStorage.create(streams(), 5, discount={"a": 0.9}),
            r"discount must have the streams of value, \['a', 'b'\], got \['a'\]",
        ),
        (
            lambda: RolloutStorage.create(streams(), 5).before_gradients(LAST),
            r"last_values must have the streams .*\['a', 'b'\], got a single one",
        ),
        (
            lambda: RolloutStorage.create(streams(), 5).update_storage_parameter(
                "discount", {"c": 1}
            ),
            r"discount must have the streams of value, \['a', 'b'\], got \['c'\]",
        ),
    ],
)
def test_streams_that_do_not_fit_are_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def recurrent():
    return RolloutStorage.create(
        step(DATA), 6, initial_carry=np.zeros((3, 2), np.float32), sequence_length=2
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recurrent().add(step(DATA)), r"(?s)carry.*initial_carry given.*got: +nothing"),
        (lambda: recurrent().insert_data_slice(trajectory(0, 6)), r"(?s)carry.*got: +nothing"),
        (lambda: recurrent().add(step(DATA), np.zeros((3, 1), np.float32)), r"carry.*\[3, 2\]"),
        (
            lambda: recurrent().plan(KEY, sequence_length=3),
            "stored every 2 steps.*sequence_length=3",
        ),
        (lambda: recurrent().plan(KEY, by="environment"), "every 2 steps.*sequence_length=6"),
    ],
)
def test_recurrent_misuse_is_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def ring(**options):
    options = {"num_storages": 6, "batch_size": 2, **options}
    return DistributedStorage.create(step(DATA), 5, **options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: ring(num_storages=7),
            ValueError,
            "num_envs must divide num_storages = 7, got 3",
        ),
        (
            lambda: ring(batch_size=4),
            ValueError,
            "batch_size must divide num_storages = 6, got 4. Use 3",
        ),
        (
            lambda: ring(max_truncations=-1),
            ValueError,
            "max_truncations must be at least 0, got -1",
        ),
        (lambda: DistributedStorage.create([1], 5), TypeError, r"Transition, got \[1\]"),
        (lambda: ring().add(trajectory(0, 4), DATA.obs), ValueError, r"unroll: .*\[5, 3"),
        (lambda: ring().add(DATA, DATA.obs), ValueError, r"last_obs.* must have the shape \[3, "),
        (
            lambda: ring().add(DATA, step(DATA.obs), final_obs=DATA.obs),
            ValueError,
            "final_obs needs final_step",
        ),
        (
            lambda: ring().insert_data_slice(DATA),
            TypeError,
            r"(?s)must be of type Unrolls.*Use add\(",
        ),
        (lambda: ring().plan(num_epochs=2), TypeError, "num_epochs"),
        (lambda: ring().generate_batches(KEY, shuffle=True), TypeError, "shuffle"),
        (lambda: ring().plan(num_mini_batch=4), ValueError, "between 1 and 3, got 4"),
        (lambda: ring().update_storage_parameter("discount", 1), ValueError, "it has none"),
    ],
)
def test_ring_misuse_is_explained(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_factory_takes_the_size_by_position_too():
    make = RolloutStorage.create_factory(4, discount=0.5)
    assert make == RolloutStorage.create_factory(num_steps=4, discount=0.5)
    assert make(step(DATA)).num_steps == 4


@pytest.mark.parametrize("kind", [RolloutStorage, DecoupledRolloutStorage, DistributedStorage])
@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("obs_space", "act_space"), {"size": 16}),
        (("obs_space",) * 10, {}),
        ((), {"example": step(DATA), "num_steps": 4}),
        ((), {}),
    ],
)
def test_the_constructor_names_create(kind, args, options):
    with pytest.raises(TypeError, match=rf"{kind.__name__}\.create\(example, num_steps"):
        kind(*args, **options)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"num_storages": 12}])
def test_the_defaults_of_a_ring_fit_any_number_of_environments(options):
    ring = DistributedStorage.create(step(DATA), 100, **options)
    assert ring.num_storages % ring.batch_size == ring.num_storages % ring.num_envs == 0
    assert ring.num_storages >= 2 * max(ring.num_envs, ring.batch_size)
