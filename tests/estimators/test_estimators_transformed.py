"""Estimators under vmap, grad and shard_map, in other dtypes, and with bad input."""

import estimator_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from estimator_calls import (
    NAMES,
    assert_same,
    call,
    clean_case,
    each_kind,
    expected,
    float32,
)

import jaxroll
from jaxroll.estimators import bootstrap


def column(*numbers):
    return jnp.array(numbers, jnp.float32)[:, None]


R, V = column(1, 2, 4), column(8, 4, 2)
LAST = jnp.array([6.0])
NEVER = column(0, 0, 0) > 0


@each_kind
def test_vmap_over_discount_equals_one_call_each(name, options):
    case = float32(reference.random_case(np.random.default_rng(16), 4, 3, per_row=False))
    discounts = jnp.array([0.0, 0.5, 1.0])
    together = jax.vmap(lambda g: call(name, {**case, "discount": g}, **options))(discounts)
    for i, g in enumerate(discounts):
        alone = call(name, {**case, "discount": g}, **options)
        assert_same([x[i] for x in together], alone, atol=1e-6)


@each_kind
def test_gradients_are_finite_with_nan_in_unused_places(name, options):
    case = float32(reference.random_case(np.random.default_rng(17), 7, 4))
    floats = {k: x for k, x in case.items() if x.dtype == np.float32}
    flags = {k: x for k, x in case.items() if k not in floats}
    extra = {k: jnp.float32(x) for k, x in options.items() if k != "n"}
    fixed = {k: x for k, x in options.items() if k == "n"}

    @jax.jit
    @jax.grad
    def gradient(inputs):
        floats, extra = inputs
        out = call(name, {**floats, **flags}, **extra, **fixed)
        return sum(jnp.sum(jnp.where(flags["valid"], x, 0) ** 2) for x in out)

    for path, x in jax.tree.leaves_with_path(gradient((floats, extra))):
        assert np.isfinite(x).all(), path


@pytest.mark.parametrize("name", ["gae", "vtrace", "retrace"])
def test_gradient_equals_finite_differences(name):
    with jax.enable_x64(True):
        case = clean_case(18, num_steps=5, num_envs=2)
        case = {k: np.nan_to_num(x) for k, x in case.items()}
        fields = [k for k in case if case[k].dtype == np.float64]

        def value(floats):
            return sum(jnp.sum(jnp.sin(x)) for x in call(name, {**case, **floats}))

        gradient = jax.grad(value)({k: case[k] for k in fields})
        rng = np.random.default_rng(0)
        direction = {k: rng.normal(size=case[k].shape) for k in fields}
        h = 1e-6
        up, down = (value({k: case[k] + s * h * direction[k] for k in fields}) for s in (1, -1))
        slope = sum(np.sum(gradient[k] * direction[k]) for k in fields)
        np.testing.assert_allclose((up - down) / (2 * h), slope, rtol=1e-5)


@each_kind
@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_over_environments_changes_nothing(name, options, check_vma):
    case = float32(reference.random_case(np.random.default_rng(19), 5, 16))
    mesh = jax.make_mesh((8,), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {k: jax.P("envs") if k == "last_values" else jax.P(None, "envs") for k in case}
    sharded = jax.jit(
        jax.shard_map(
            lambda c: call(name, c, **options),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=jax.P(None, "envs"),
            check_vma=check_vma,
        )
    )
    assert_same(sharded(case), call(name, case, **options), atol=1e-6)


# Dtypes.


@each_kind
def test_bfloat16_stays_bfloat16(name, options):
    case = reference.random_case(np.random.default_rng(21), 4, 3, per_row=False)
    half = {
        k: jnp.asarray(x, jnp.bfloat16) if np.ndim(x) and x.dtype == np.float64 else x
        for k, x in case.items()
    }
    got = call(name, half, **options)
    assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
    assert_same(got, expected(name, case, **options), rtol=0.1, atol=0.1)


@each_kind
def test_float64_is_exact_under_x64(name, options):
    case = reference.random_case(np.random.default_rng(22), 6, 3)
    with jax.enable_x64(True):
        got = call(name, case, **options)
        assert {x.dtype for x in got} == {jnp.dtype("float64")}
        assert_same(got, expected(name, case, **options), rtol=1e-12, atol=1e-12)


def test_integer_rewards_and_flags_and_one_environment_are_accepted():
    args = (jnp.zeros(3), jnp.float32(0), jnp.array([0, 1, 0]), None, None, 0.5, 1.0)
    out = jaxroll.gae(jnp.array([1, 2, 4]), *args)
    assert out.returns.tolist() == [2.0, 2.0, 4.0]


# Errors.


def test_truncated_without_bootstrap_values_says_why():
    with pytest.raises(ValueError, match=r"belongs to the next episode.*truncated=None"):
        jaxroll.gae(R, V, LAST, NEVER, NEVER, None, 0.5, 0.5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("last_values", np.zeros((1, 3), np.float32)),
        ("terminated", np.zeros((3, 4), bool)),
        ("truncated", np.zeros(4, bool)),
        ("bootstrap_values", np.zeros((4, 3, 1), np.float32)),
        ("valid", np.zeros((4, 1), bool)),
        ("discount", np.zeros(3, np.float32)),
    ],
)
def test_wrong_shapes_are_named_with_what_they_should_be(name, field, wrong):
    case = float32(reference.random_case(np.random.default_rng(0), 4, 3))
    options = {"n": 1} if name == "n_step_returns" else {}
    shape = r"\[3\]" if field == "last_values" else r"\[4, 3\]"
    with pytest.raises(ValueError, match=rf"^{field} must.*{shape}"):
        jax.eval_shape(lambda: call(name, {**case, field: wrong}, **options))


def test_other_bad_input_is_explained():
    with pytest.raises(TypeError, match=r"values must be floating point, got int32.*astype"):
        jaxroll.gae(R, V.astype(int), LAST, None, None, None, 0.5, 0.5)
    with pytest.raises(ValueError, match=r"rewards must be time-major.*rewards\[None\]"):
        jaxroll.gae(1.0, 1.0, 1.0, None, None, None, 0.5, 0.5)
    for n, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"n must be (at least 1|an integer), got"):
            jaxroll.n_step_returns(R, V, LAST, None, None, None, 0.5, n=n)


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("discount", 1.5, r"discount must be in \[0, 1\], got 1.5"),
        ("discount", np.nan, r"discount must be a number, got nan"),
        ("discount", "0.9", r"discount must be a number, got '0.9'"),
        ("discount", 0.9j, r"discount must be a number, got 0.9j"),
        ("trace_lambda", -0.1, r"lambda must be in \[0, 1\], got -0.1"),
        ("rewards", None, r"rewards must be an array of real numbers"),
        ("rewards", [[1.0], [1.0, 2.0]], r"rewards must be an array"),
        ("values", np.ones((4, 3), complex), r"values must be an array of real numbers"),
        ("terminated", "yes", r"terminated must be an array of real numbers or flags"),
    ],
)
def test_what_cannot_be_meant_is_refused(field, wrong, message):
    case = float32(clean_case(0, num_steps=4, num_envs=3, per_row=False))
    with pytest.raises((TypeError, ValueError), match=message):
        call("gae", {**case, field: wrong})
    with pytest.raises(ValueError, match=r"clip_rho must be > 0, got 0\.0"):
        call("vtrace", case, clip_rho=0.0)


def test_constants_may_stand_after_the_rollout_inside_shard_map():
    mesh = jax.make_mesh((8,), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))
    fun = jax.shard_map(
        lambda r: jaxroll.discounted_returns(r, jnp.zeros(1), None, None, None, 0.5),
        mesh=mesh,
        in_specs=jax.P(None, "envs"),
        out_specs=jax.P(None, "envs"),
        check_vma=True,
    )
    assert jax.jit(fun)(jnp.ones((2, 8)))[:, 0].tolist() == [1.5, 1.0]


@each_kind
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_no_loop_over_time_on_accelerators(name, options, platform):
    case = float32(clean_case(22, num_steps=128, num_envs=2))
    traced = jax.jit(lambda c: call(name, c, **options)).trace(case)
    assert "while" not in traced.lower(lowering_platforms=(platform,)).as_text()
    gradient = jax.jit(jax.grad(lambda v: call(name, {**case, "rewards": v}, **options)[0].sum()))
    lowered = gradient.trace(case["rewards"]).lower(lowering_platforms=(platform,))
    assert "while" not in lowered.as_text()


def test_gae_for_accelerators_is_few_operations():
    case = float32(clean_case(22, num_steps=128, num_envs=2, per_row=False))
    traced = jax.jit(lambda c: call("gae", c)).trace(case)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("stablehlo.multiply") < 40, lowered.count("stablehlo.multiply")


def test_gradients_of_many_actors_are_those_of_each():
    """vmap inside grad, with as many actors as neither T nor B."""
    x, decay = np.random.default_rng(0).normal(size=(2, 3, 7, 2)).astype(np.float32)
    goes_on = jnp.asarray(x > -1)

    def loss(scale, x, decay, goes_on):
        sums = bootstrap.discounted_cumsum(scale * x, decay, goes_on)
        return jnp.sum(sums * jnp.where(goes_on, sums, 0))

    together = jax.grad(lambda s: jnp.sum(jax.vmap(loss, (None, 0, 0, 0))(s, x, decay, goes_on)))
    each = [jax.grad(loss)(1.5, *row) for row in zip(x, decay, goes_on)]
    np.testing.assert_allclose(jax.jit(together)(1.5), sum(each), rtol=1e-5)
