"""Policies: protocol, resets, masks, observations of every kind, equality."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxroll import distributions, spaces
from jaxroll.networks import Policy, check_policy, make_decoupled_policy, make_policy
from jaxroll.networks.cpu_products import convolution, product
from jaxroll.networks.layers import Dense, SmallConv, as_vector
from jaxroll.types import PolicyOutput

KEY = jax.random.key(0)
VECTOR, COIN = spaces.Box.create(-1.0, 1.0, (3,)), spaces.Discrete(2)
T, B = 5, 4


def observations(space, batch, seed=0):
    """Random members of a space, leaves [*batch, ...]."""
    rng = np.random.default_rng(seed)
    if isinstance(space, spaces.Dict):
        return {k: observations(s, batch, seed + i) for i, (k, s) in enumerate(space.items)}
    shape = (*batch, *space.shape)
    match space:
        case spaces.Discrete(n=n):
            return jnp.asarray(rng.integers(0, n, shape), jnp.int32)
        case spaces.MultiDiscrete(nvec=nvec):
            return jnp.asarray(rng.integers(0, np.asarray(nvec), shape), jnp.int32)
        case spaces.MultiBinary():
            return jnp.asarray(rng.integers(0, 2, shape), jnp.int32)
        case spaces.Box(high=high, dtype=dtype) if np.dtype(dtype).kind in "iub":
            return jnp.asarray(rng.integers(0, int(high) + 1, shape), dtype)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def randomized(params, seed=0):
    """Parameters large enough that every part of the network matters."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return tree.unflatten([jnp.asarray(0.5 * rng.normal(size=x.shape), x.dtype) for x in leaves])


def prepared(make=make_policy, space=VECTOR, action_space=COIN, **options):
    policy = make(space, action_space, **{"hidden_sizes": (8,), **options})
    obs = observations(space, (T, B))
    params = jax.jit(policy.init)(KEY, jax.tree.map(lambda x: x[0], obs))
    return policy, randomized(params), obs


OPTIONS = [
    {},
    {"shared_torso": True},
    {"network": "lstm"},
    {"network": "gru"},
    {"network": "lstm", "shared_torso": False, "core_size": 5},
    {"make": make_decoupled_policy, "network": "gru"},
    {"make": make_decoupled_policy},
]
IS_FIRST = jnp.asarray(np.random.default_rng(1).random((T, B)) < 0.4).at[0].set(False)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_unroll_is_a_scan_of_apply_and_value_is_its_value(options):
    policy, params, obs = prepared(**options)
    carry = jax.tree.map(lambda x: x + 0.3, policy.initial_carry(B))

    @jax.jit
    def both(params, carry, obs, is_first):
        scanned = jax.lax.scan(lambda c, x: policy.apply(params, c, *x), carry, (obs, is_first))
        value = policy.value(params, carry, obs[0], is_first[0])
        return policy.unroll(params, carry, obs, is_first), scanned, value

    unrolled, scanned, value = both(params, carry, obs, IS_FIRST)
    close(unrolled, scanned)
    close(value, unrolled[1].value[0])
    assert unrolled[1].value.shape == (T, B)


@pytest.mark.parametrize("network", ["lstm", "gru"])
def test_the_carry_matters_and_restarts_where_an_episode_starts(network):
    policy, params, obs = prepared(network=network)
    apply = jax.jit(policy.apply)
    fresh, used = policy.initial_carry(B), jax.tree.map(lambda x: x + 1, policy.initial_carry(B))
    first = jnp.array([True, False, True, False])
    _, expected = apply(params, fresh, obs[0], jnp.zeros(B, bool))
    _, got = apply(params, used, obs[0], first)
    np.testing.assert_array_equal(got.value[first], expected.value[first])
    assert (np.abs(got.value - expected.value)[~first] > 1e-3).all()
    # Beginning anew in the middle of an unroll equals unrolling the rest on its own.
    starts = jnp.zeros((T, B), bool).at[2].set(True)
    unroll = jax.jit(policy.unroll)
    whole = unroll(params, used, obs, starts)
    rest = unroll(params, fresh, obs[2:], starts[2:])
    close((whole[0], jax.tree.map(lambda x: x[2:], whole[1])), rest)


def test_default_unroll_scans_a_recurrent_policy_and_merges_a_feed_forward_one():
    def init(key, obs):
        return jnp.ones(())

    def apply(params, carry, obs, is_first):
        carry = jnp.where(is_first, 0, carry) + params * obs
        return carry, PolicyOutput(distributions.Bernoulli(obs[:, None]), carry)

    def apply_forward(params, carry, obs, is_first):
        assert obs.shape == (T * B,)
        return carry, PolicyOutput(distributions.Bernoulli(obs[:, None]), obs)

    policy = Policy.from_functions(init, apply, initial_carry=jnp.zeros)
    assert policy == Policy.from_functions(init, apply, initial_carry=jnp.zeros)
    obs, is_first = jnp.ones((T, B)), jnp.zeros((T, B), bool).at[3].set(True)
    carry, output = policy.unroll(1.0, policy.initial_carry(B), obs, is_first)
    np.testing.assert_array_equal(output.value[:, 0], [1, 2, 3, 1, 2])
    np.testing.assert_array_equal(carry, jnp.full(B, 2.0))
    _, output = Policy.from_functions(init, apply_forward).unroll(1.0, (), obs, is_first)
    assert output.value.shape == (T, B)


IMAGE = spaces.Box.create(0, 255, (84, 84, 4), np.uint8)
MINATAR = spaces.Box.create(0, 1, (10, 10, 4), np.bool_)
NESTED = spaces.Dict.create(
    {
        "image": MINATAR,
        "inner": spaces.Dict.create({"x": VECTOR, "room": spaces.Discrete(5)}),
        "switches": spaces.MultiBinary(2),
        "many": spaces.MultiDiscrete((2, 3)),
    }
)


@pytest.mark.parametrize(
    ("space", "features"),
    [
        (VECTOR, 3),
        (spaces.Box.create(-1, 1, ()), 1),
        (spaces.Discrete(7), 7),
        (spaces.MultiDiscrete((2, 3)), 5),
        (MINATAR, 8 * 8 * 16),
        (IMAGE, 7 * 7 * 64),
        (spaces.Box.create(0, 255, (4, 84, 84), np.uint8), 7 * 7 * 64),
        (NESTED, 5 * 8),
    ],
    ids=str,
)
def test_every_observation_finds_its_torso(space, features):
    policy = make_policy(space, COIN, hidden_sizes=(8,))
    obs = spaces.zeros(space, (B,))
    check_policy(policy, obs, COIN)
    params = jax.eval_shape(policy.init, jax.eval_shape(lambda: jax.random.key(0)), obs)
    torso = params["torso" if policy.shared_torso else "actor"]["encoder"]
    assert torso["MLP_0"]["Dense_0"]["kernel"].shape == (features, 8)


def test_dict_entries_all_reach_the_output_and_keep_gradients_finite():
    policy, params, obs = prepared(space=NESTED)
    rows = jax.tree.map(lambda x: x[0], obs)

    @jax.jit
    def value(params, rows):
        return policy.value(params, (), rows, jnp.zeros(B, bool))

    base = value(params, rows)
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        changed = jax.tree_util.tree_map_with_path(
            lambda p, x, path=path, leaf=leaf: jnp.zeros_like(leaf) if p == path else x, rows
        )
        assert (value(params, changed) != base).any(), path
    grads = jax.jit(jax.grad(lambda p: value(p, rows).sum()))(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("shape", [(5, 5, 1), (5,)], ids=["image", "vector"])
@pytest.mark.parametrize("high", [255, 1, 7])
def test_bytes_are_scaled_by_the_high_of_their_space(shape, high):
    policy, params, obs = prepared(space=spaces.Box.create(0, high, shape, np.uint8))
    as_floats = make_policy(spaces.Box.create(0, 1, shape), COIN, hidden_sizes=(8,))
    is_first = jnp.zeros(B, bool)
    got = policy.value(params, (), obs[0], is_first)
    close(got, as_floats.value(params, (), obs[0].astype(jnp.float32) / high, is_first))


def test_bounds_of_each_entry_scale_bytes_by_the_largest_and_switches_by_one():
    box = spaces.Box.create(np.zeros(3), np.array([0, 3, 6]), dtype=np.uint8)
    obs = np.array([[0, 3, 6]], np.uint8)
    close(as_vector(box, obs, np.float32), [[0, 0.5, 1]])
    close(
        as_vector(spaces.MultiBinary(3), np.array([[0, 1, 1]], np.uint8), np.float32), [[0, 1, 1]]
    )
    zero = spaces.Box.create(0, 0, (3,), np.uint8)
    close(as_vector(zero, np.zeros((1, 3), np.uint8), np.float32), np.zeros((1, 3)))


@pytest.mark.parametrize("make", [make_policy, make_decoupled_policy])
def test_action_mask_reaches_the_distribution_and_not_the_torso(make):
    space = spaces.Dict.create(
        {"x": VECTOR, "action_mask": spaces.Box.create(0, 1, (3,), np.bool_)}
    )
    policy, params, obs = prepared(make, space, spaces.Discrete(3))
    mask = jnp.asarray([[True, False, True], [True, True, False], [False] * 3, [True] * 3])
    rows = {"x": obs["x"][0], "action_mask": mask}
    _, output = jax.jit(policy.apply)(params, (), rows, jnp.zeros(B, bool))
    probs = np.asarray(output.distribution.probs())
    assert probs[0, 1] == probs[1, 2] == 0
    assert np.isnan(probs[2]).all()
    assert (probs[3] > 0).all()
    free = rows | {"action_mask": jnp.ones((B, 3), bool)}
    close(output.value, policy.value(params, (), free, jnp.zeros(B, bool)))
    alone = make_policy(VECTOR, spaces.Discrete(3), hidden_sizes=(8,))
    shapes = jax.eval_shape(alone.init, KEY, rows["x"])
    if make is make_policy:  # one entry is left: no embedding, as if it came alone
        assert jax.tree.structure(shapes) == jax.tree.structure(params)


def test_continuous_actions_have_a_learned_state_independent_spread():
    box = spaces.Box.create([-2.0, 0.0], [2.0, 1.0])
    policy, params, obs = prepared(action_space=box, squash=True, log_std_init=-0.5)
    assert isinstance(policy.unroll(params, (), obs, IS_FIRST)[1].distribution.low, tuple)
    fresh = policy.init(KEY, obs[0])
    np.testing.assert_array_equal(fresh["policy_head"]["log_std"], [-0.5, -0.5])
    _, output = policy.unroll(params, (), obs, IS_FIRST)
    assert box.contains(output.distribution.sample(KEY))
    assert (np.ptp(output.distribution.log_std, axis=(0, 1)) == 0).all()
    grads = jax.grad(lambda p: policy.unroll(p, (), obs, IS_FIRST)[1].distribution.entropy().sum())(
        params
    )
    assert (grads["policy_head"]["log_std"] != 0).all()


def test_streams_give_a_dict_of_values():
    policy, params, obs = prepared(streams=("extrinsic", "intrinsic"))
    _, output = policy.unroll(params, (), obs, IS_FIRST)
    assert {k: v.shape for k, v in output.value.items()} == {
        "extrinsic": (T, B),
        "intrinsic": (T, B),
    }
    assert (output.value["extrinsic"] != output.value["intrinsic"]).any()
    check_policy(policy, obs[0], COIN)


def test_fresh_parameters_are_orthogonal_with_small_policy_and_zero_bias():
    policy = make_policy(VECTOR, COIN, hidden_sizes=(16, 16))
    params = policy.init(KEY, jnp.zeros((1, 3)))
    kernel = params["actor"]["encoder"]["MLP_0"]["Dense_1"]["kernel"]
    np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(16), atol=1e-5)
    head = params["policy_head"]["Dense_0"]["kernel"]
    np.testing.assert_allclose(head.T @ head, 1e-4 * np.eye(2), atol=1e-8)
    np.testing.assert_allclose(np.square(params["value_head"]["Dense_0"]["kernel"]).sum(), 1, 1e-5)
    biases = [x for p, x in jax.tree_util.tree_leaves_with_path(params) if "bias" in str(p)]
    assert len(biases) == 6
    assert all((b == 0).all() for b in biases)


def test_dense_equals_flax_in_value_gradient_and_tangent():
    ours, theirs = Dense(5, "tanh"), nn.Dense(5)
    x = jax.random.normal(jax.random.key(0), (7, 3))
    params = jax.tree.map(lambda p: p + 0.1, ours.init(jax.random.key(1), x))

    def loss(module, activation, params, x):
        return jnp.sum(jnp.sin(activation(module.apply(params, x))))

    one = functools.partial(loss, ours, lambda y: y)
    other = functools.partial(loss, theirs, jnp.tanh)
    along = jax.tree.map(jnp.ones_like, (params, x))
    for transform in (
        lambda f: f(params, x),
        lambda f: jax.grad(f, (0, 1))(params, x),
        lambda f: jax.jvp(f, (params, x), along),
        lambda f: jax.vmap(jax.grad(f), (None, 0))(params, jnp.stack([x, 2 * x])),
        lambda f: jax.jvp(jax.grad(f), (params, x), along),
    ):
        for a, b in zip(jax.tree.leaves(transform(one)), jax.tree.leaves(transform(other))):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(127, 1), (128, 4)])
def test_a_product_is_the_product_in_value_and_gradients(rows, columns):
    rng = np.random.default_rng(rows)
    x, kernel, back = (
        jnp.asarray(rng.normal(size=s), jnp.float32)
        for s in ((rows, 7), (7, columns), (rows, columns))
    )
    value, pull = jax.vjp(product, x, kernel)
    np.testing.assert_allclose(value, x @ kernel, rtol=1e-5, atol=1e-5)
    for got, expected in zip(pull(back), (back @ kernel.T, x.T @ back)):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    tangent = jax.jvp(product, (x, kernel), (x, kernel))[1]
    np.testing.assert_allclose(tangent, 2 * (x @ kernel), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 3])
def test_a_convolution_by_patches_equals_flax(size):
    ours = SmallConv(6, size)
    theirs = nn.Conv(6, (size, size), padding="VALID")
    x = jax.random.normal(KEY, (4, 7, 5, 3))
    params = randomized(ours.init(KEY, x))

    def run(module):
        loss = lambda p, x: jnp.sum(jnp.sin(module.apply(p, x)))  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(params, x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run(ours), run(theirs)
    )


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_get_a_plain_product_and_convolution(platform):
    image, kernel = jnp.ones((4, 7, 5, 3)), jnp.ones((3, 3, 3, 6))

    def loss(image, kernel, head):
        return jnp.sum(product(convolution(image, kernel).reshape(4, -1), head))

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(image, kernel, jnp.ones((90, 2)))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.convolution" in text
    assert "optimization_barrier" not in text
    assert "stablehlo.concatenate" not in text
    own = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "stablehlo.convolution" not in own
    assert "optimization_barrier" in own


def test_bfloat16_torso_keeps_float32_parameters_and_outputs():
    policy, params, obs = prepared(dtype=jnp.bfloat16, network="lstm")
    carry, output = policy.unroll(params, policy.initial_carry(B), obs, IS_FIRST)
    leaves = jax.tree.leaves((params, carry, output))
    assert {x.dtype for x in leaves} == {np.dtype("float32")}
    check_policy(policy, obs[0], COIN)


@pytest.mark.parametrize("action_space", [COIN, spaces.MultiDiscrete((2, 3)),
                                          spaces.MultiBinary(3), VECTOR])  # fmt: skip
def test_decoupled_advantage_sees_the_action_and_the_actor_only(action_space):
    policy, params, obs = prepared(make_decoupled_policy, action_space=action_space)
    one = observations(action_space, (T, B), seed=3)
    other = jnp.ones_like(one) - one

    def parts(params):
        _, output = policy.unroll(params, (), obs, IS_FIRST)
        extras = policy.act_extras(params, output, one)
        actor = extras["adv_pred"] + output.distribution.log_prob(one)
        sums = jnp.stack([actor.sum(), output.value.sum()])
        return sums, (extras, policy.advantage(params, output, other))

    grads, (extras, of_other) = jax.jit(jax.jacrev(parts, has_aux=True))(params)
    assert {k: v.shape for k, v in extras.items()} == {"adv_pred": (T, B)}
    assert (extras["adv_pred"] != of_other).any()
    for name, own in (("actor", 0), ("critic", 1)):
        for g in jax.tree.leaves(grads[name]):
            assert np.abs(g[own]).sum() > 0
            assert (g[1 - own] == 0).all()


def test_policies_made_alike_are_equal_and_share_a_compilation():
    for make in (make_policy, make_decoupled_policy):
        a, b = (make(NESTED, COIN, hidden_sizes=[8], network="lstm") for _ in range(2))
        assert a == b
        assert hash(a) == hash(b)
        assert a != make(NESTED, COIN, hidden_sizes=(9,), network="lstm")

    @chex.assert_max_traces(1)
    def run(policy, obs):
        return policy.initial_carry(2)

    jitted = jax.jit(run, static_argnums=0)
    jitted(make_policy(VECTOR, COIN), jnp.zeros(3))
    jitted(make_policy(VECTOR, COIN), jnp.zeros(3))


@dataclasses.dataclass(frozen=True)
class Wrong(Policy):
    logits: tuple = (B, 2)
    value_shape: tuple = (B,)
    carry: tuple = ()
    output: bool = True

    def init(self, key, obs):
        return ()

    def apply(self, params, carry, obs, is_first):
        if not self.output:
            return jnp.zeros(self.logits), jnp.zeros(self.value_shape)
        distribution = distributions.Categorical(jnp.zeros(self.logits))
        carry = jnp.zeros(self.carry) if self.carry else carry
        return carry, PolicyOutput(distribution, jnp.zeros(self.value_shape))


@pytest.mark.parametrize(
    ("policy", "space", "message"),
    [
        (Wrong(logits=(B, 3)), COIN, r"2 choices .* got 3"),
        (Wrong(value_shape=(B, 1)), COIN, r"shape \(4,\), one number per row, got \(4, 1\). Drop"),
        (Wrong(carry=(B, 3)), COIN, r"carry like the one it is given"),
        (Wrong(output=False), COIN, r"PolicyOutput"),
        (Wrong(logits=(B, 5, 2)), COIN, r"must be integers \(4,\) .* got integers \(4, 5\)"),
        (Wrong(), spaces.Box.create(-1, 1, ()), r"must be floats"),
    ],
)
def test_a_wrong_policy_is_named_before_anything_runs(policy, space, message):
    check_policy(Wrong(), jnp.zeros((B, 3)), COIN)
    with pytest.raises((ValueError, TypeError), match=message):
        check_policy(policy, jnp.zeros((B, 3)), space)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "ltsm"}, "network must be .* mean 'lstm'"),
        ({"activation": "tahn"}, "activation must be .* mean 'tanh'"),
        ({"network": "cnn"}, "three axes"),
        ({"hidden_sizes": ()}, "one or more"),
        ({"streams": ("a", "a")}, "different names"),
        ({"squash": True}, "squash=True is for Box"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_policy(VECTOR, COIN, **options)


def test_observations_that_do_not_fit_the_space_and_shared_decoupled_torsos_are_refused():
    with pytest.raises(ValueError, match=r"\[batch, \*\(3,\)\].*got \(4, 2\)"):
        make_policy(VECTOR, COIN).init(KEY, jnp.zeros((4, 2)))
    with pytest.raises(ValueError, match="never shares"):
        make_decoupled_policy(VECTOR, COIN, shared_torso=True)


@pytest.mark.parametrize("make", [make_policy, make_decoupled_policy])
def test_a_missing_space_and_a_core_without_units_are_refused(make):
    with pytest.raises(TypeError, match=r"observation_space must be one of .*None"):
        make(None, COIN)
    for size in (-1, 0):
        with pytest.raises(ValueError, match=f"core_size must be at least 1, got {size}"):
            make(VECTOR, COIN, network="lstm", core_size=size)
    with pytest.raises(TypeError, match="core_size"):
        make(VECTOR, COIN, network="lstm", core_size="8")
