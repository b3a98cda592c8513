"""Gradients over actors: sums, not means of means; clipped, guarded, the same on any mesh."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxroll import RolloutStorage, Transition, learner
from jaxroll.learner import (
    apply_gradient,
    check_reduction,
    gather_actors,
    gradient,
    map_actors,
    minibatch_updates,
    nonfinite_leaves,
    sum_actors,
)

NUM_ACTORS, ROWS = 4, 6
PARAMS = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.array(0.1)}


def regression(params, batch):
    """½ (x·w + b − y)², weighted, as a sum and its weight."""
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    total = jnp.sum(0.5 * batch["weight"] * jnp.square(error))
    weight = jnp.sum(batch["weight"])
    return total, weight, {"loss": total, "rows": weight}


@pytest.fixture(scope="module")
def batches():
    """One batch for each actor; actors have different numbers of rows that count."""
    rng = np.random.default_rng(0)
    weight = (rng.random((NUM_ACTORS, ROWS)) < 0.6).astype(np.float32)
    weight[0] = 0
    return {
        "x": jnp.asarray(rng.normal(size=(NUM_ACTORS, ROWS, 3)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=(NUM_ACTORS, ROWS)), jnp.float32),
        "weight": jnp.asarray(weight),
    }


def by_hand(batches, mean=True):
    """The gradient over all rows of all actors, in float64."""
    x, y, weight = (np.asarray(batches[k], np.float64) for k in ("x", "y", "weight"))
    x, y, weight = x.reshape(-1, 3), y.reshape(-1), weight.reshape(-1)
    error = (x @ np.asarray(PARAMS["w"], np.float64) + float(PARAMS["b"]) - y) * weight
    scale = weight.sum() if mean else 1
    return {"w": x.T @ error / scale, "b": error.sum() / scale}


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("mean", [True, False])
def test_gradient_is_that_of_all_rows_of_all_actors(batches, reduction, mean):
    grads, metrics = gradient(regression, PARAMS, batches, reduction=reduction, mean=mean)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        grads,
        by_hand(batches, mean),
    )
    assert metrics["rows"] == batches["weight"].sum()


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_gradient_is_the_same_on_every_mesh(batches, reduction):
    def on(num_devices):
        mesh = jax.make_mesh((num_devices,), ("actors",), axis_types=(AxisType.Auto,))
        run = jax.shard_map(
            lambda b: gradient(regression, PARAMS, b, axis_name="actors", reduction=reduction),
            mesh=mesh,
            in_specs=PartitionSpec("actors"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return jax.jit(run)(batches)

    alone, spread = on(1), on(4)
    if reduction == "exact":
        chex.assert_trees_all_equal(alone, spread)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        spread[0],
        by_hand(batches),
    )


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_gradient_is_the_same_where_jax_checks_what_varies(batches, reduction, num_devices):
    def loss(params, batch):
        total, weight, metrics = regression(params, batch)
        return total, weight, metrics | {"batches": jnp.ones(()), "any": jnp.sum(weight > 0)}

    def on(check_vma):
        mesh = jax.make_mesh((num_devices,), ("actors",), axis_types=(AxisType.Auto,))
        run = jax.shard_map(
            lambda p, b: gradient(loss, p, b, axis_name="actors", reduction=reduction),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("actors")),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
        return jax.jit(run)(PARAMS, batches)

    checked = on(True)
    chex.assert_trees_all_equal(checked, on(False))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        checked[0],
        by_hand(batches),
    )
    assert checked[1]["batches"] == NUM_ACTORS


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_rows_are_split_where_jax_checks_what_varies(batches, reduction, monkeypatch):
    monkeypatch.setattr(learner, "chunk_rows", lambda num_rows: 2)
    mesh = jax.make_mesh((4,), ("actors",), axis_types=(AxisType.Auto,))
    grads, _ = jax.shard_map(
        lambda p, b: gradient(
            regression, p, b, axis_name="actors", reduction=reduction, split_rows=True
        ),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("actors")),
        out_specs=PartitionSpec(),
    )(PARAMS, batches)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), grads, by_hand(batches)
    )


def test_gradient_over_a_vmapped_axis(batches):
    one_each = jax.tree.map(lambda x: x[:, None], batches)
    run = jax.vmap(
        lambda b: gradient(regression, PARAMS, b, axis_name="actors"), axis_name="actors"
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-6),
        run(one_each)[0],
        by_hand(batches),
    )


def test_no_rows_at_all_give_no_gradient(batches):
    grads, _ = gradient(regression, PARAMS, {**batches, "weight": 0 * batches["weight"]})
    assert all(not x.any() for x in jax.tree.leaves(grads))


def test_integers_are_added_as_integers_across_devices():
    mesh = jax.make_mesh((4,), ("actors",), axis_types=(AxisType.Auto,))
    tree = {"count": jnp.full(4, 2**24 + 1, jnp.int32), "total": jnp.arange(4.0)}
    for reduction in ("fast", "exact"):
        run = jax.shard_map(
            lambda t, r=reduction: sum_actors(t, axis_name="actors", reduction=r),
            mesh=mesh,
            in_specs=PartitionSpec("actors"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        out = run(tree)
        assert out["count"] == 4 * (2**24 + 1)  # float32 would have lost the ones
        assert out["total"] == 6
    tree["flag"] = jnp.arange(4) == 2
    for check_vma in (False, True):
        gathered = jax.shard_map(
            lambda t: gather_actors(t, axis_name="actors"),
            mesh=mesh,
            in_specs=PartitionSpec("actors"),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )(tree)
        chex.assert_trees_all_equal(gathered, tree)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_map_actors_maps_the_leading_axis(count, reduction):
    x, y = jnp.arange(2.0 * count).reshape(count, 2), jnp.arange(float(count))
    out = map_actors(lambda x, y: {"sum": x.sum() + y}, x, y, reduction=reduction)
    np.testing.assert_array_equal(out["sum"], x.sum(1) + y)


def test_minibatch_updates_take_one_step_for_each_row_of_the_plan():
    """Against a Python loop over the same minibatches, of two actors."""
    rng = np.random.default_rng(1)
    num_steps, num_envs = 4, 3

    def storage(actor):
        step = Transition(
            obs=jnp.zeros((num_envs, 3)),
            action=jnp.zeros(num_envs),
            reward=jnp.zeros(num_envs),
            terminated=jnp.zeros(num_envs, bool),
            value=jnp.zeros(num_envs),
        )
        trajectory = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_steps, *x.shape)), step)
        trajectory = trajectory.replace(
            obs=jnp.asarray(rng.normal(size=(num_steps, num_envs, 3)), jnp.float32),
            reward=jnp.asarray(rng.normal(size=(num_steps, num_envs)), jnp.float32),
        )
        return RolloutStorage.create(step, num_steps).insert_data_slice(trajectory)

    storages = [storage(a).before_gradients(jnp.zeros(num_envs)) for a in range(2)]
    plans = [
        s.plan(jax.random.key(a), num_mini_batch=2, num_epochs=3) for a, s in enumerate(storages)
    ]

    def loss(params, batch):
        step = batch.transition
        return regression(params, {"x": step.obs, "y": step.reward, "weight": batch.weights})

    optimizer = optax.adam(0.01)
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *trees)  # noqa: E731
    params, _, metrics, report = minibatch_updates(
        loss, optimizer, PARAMS, optimizer.init(PARAMS), stack(storages), stack(plans)
    )
    expected, opt_state = PARAMS, optimizer.init(PARAMS)
    for i in range(6):
        parts = [s.minibatch(jax.tree.map(lambda x, i=i: x[i], p)) for s, p in zip(storages, plans)]

        def mean(params, parts=parts):
            sums = [loss(params, part)[:2] for part in parts]
            return sum(s for s, _ in sums) / sum(w for _, w in sums)

        updates, opt_state = optimizer.update(jax.grad(mean)(expected), opt_state)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected
    )
    assert metrics["rows"].tolist() == [12.0] * 6
    assert report["grad_norm"].shape == (6,)
    assert report["nonfinite"].tolist() == [0, 0]

    first = storages[0].contents().transition.obs[0, 0, 0]

    def spoilt(params, batch):
        """Not finite in the minibatch of each epoch that has the first row."""
        total, weight, metrics = loss(params, batch)
        has_first = (batch.transition.obs[:, 0] == first).any()
        return jnp.where(has_first, jnp.nan, 1) * total, weight, metrics

    params, _, _, report = minibatch_updates(
        spoilt, optimizer, PARAMS, optimizer.init(PARAMS), stack(storages), stack(plans)
    )
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))
    assert report["nonfinite"].tolist() == [3, 3]
    assert (report["grad_norm"] == 0).sum() == 3


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="'fast', 'exact', got 'slow'"):
        check_reduction("slow")


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("num_actors", [1, 2])
def test_a_gradient_taken_by_chunks_is_the_gradient(reduction, num_actors):
    rows = 3 * learner.CHUNK_ROWS
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(num_actors, rows, 3)), jnp.float32)
    weights = jnp.asarray(rng.random((num_actors, rows)) < 0.7, jnp.float32)

    def loss(params, batch):
        x, w = batch
        errors = jnp.square(jnp.tanh(x @ params) - 1)
        return jnp.sum(w * errors), jnp.sum(w), {"errors": jnp.sum(w * errors)}

    params = jnp.asarray([0.1, -0.2, 0.3])
    whole, split = (
        learner.gradient(loss, params, (x, weights), reduction=reduction, split_rows=split_rows)
        for split_rows in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, split)


def test_only_a_cpu_takes_rows_by_chunks():
    rows = 2 * learner.CHUNK_ROWS
    batch = {"x": jnp.ones((1, rows, 3)), "y": jnp.ones((1, rows)), "weight": jnp.ones((1, rows))}
    traced = jax.jit(lambda b: gradient(regression, PARAMS, b, split_rows=True)).trace(batch)

    def loops(platform):
        return traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.while")

    assert (loops("cpu"), loops("cuda"), loops("tpu")) == (1, 0, 0)


@pytest.mark.parametrize(
    ("rows", "chunk"), [(4096, 2048), (5120, 1280), (2048, None), (4093, None)]
)
def test_chunks_divide_the_rows(rows, chunk):
    assert learner.chunk_rows(rows) == chunk


OPTIMIZERS = {
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(jnp.float32(0.1))),
    "rmsprop": optax.rmsprop(jnp.float32(0.1), decay=jnp.float32(0.9), eps=jnp.float32(0.01)),
}


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("seen", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(name, seen, bad):
    optimizer = OPTIMIZERS[name]
    params, opt_state = PARAMS, optimizer.init(PARAMS)
    for _ in range(seen):
        good = {"w": jnp.array([1.0, 2.0, -1.0]), "b": jnp.array(1.0)}
        params, opt_state, norm = apply_gradient(optimizer, params, opt_state, good)
        np.testing.assert_allclose(norm, 7**0.5, rtol=1e-6)
        assert nonfinite_leaves(good).tolist() == [0, 0]
    grads = {"w": jnp.array([1.0, bad, 1.0]), "b": jnp.array(1.0)}
    after = apply_gradient(optimizer, params, opt_state, grads)
    chex.assert_trees_all_equal(after[:2], (params, opt_state))
    assert not jnp.isfinite(after[2])
    assert nonfinite_leaves(grads).tolist() == [0, 1]  # leaves in order: b, w


def test_a_sum_that_overflows_names_the_largest_leaf():
    adam = OPTIMIZERS["clipped adam"]
    large = {"w": jnp.full(3, 1.05e19), "b": jnp.array(1.0e19)}  # squares fit, their sum does not
    after = apply_gradient(adam, PARAMS, adam.init(PARAMS), large)
    chex.assert_trees_all_equal(after[0], PARAMS)
    assert nonfinite_leaves(large).tolist() == [0, 1]


def test_a_step_has_no_branch_on_data():
    adam = OPTIMIZERS["clipped adam"]
    step = jax.make_jaxpr(lambda *args: apply_gradient(adam, *args))
    assert "cond[" not in str(step(PARAMS, adam.init(PARAMS), PARAMS))
