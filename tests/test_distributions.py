"""Distributions agree with distrax, scipy and their own samples."""

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings, strategies as st

from jaxroll import distributions as D, spaces
from jaxroll.distributions import continuous

KEY = jax.random.key(0)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make(kind, batch=(5,), seed=0):
    a, b = normal(seed, *batch, 4), 0.5 * normal(seed + 1, *batch, 4)
    mask = jnp.broadcast_to(jnp.array([True, False, True, True]), (*batch, 4))
    return {
        "categorical": lambda: D.Categorical(a),
        "coin": lambda: D.Categorical(a[..., :2]),
        "masked": lambda: D.Categorical.create(a, mask),
        "many": lambda: D.Categorical(normal(seed, *batch, 50)),
        "multi": lambda: D.MultiCategorical.create(a, (3, 1)),
        "bernoulli": lambda: D.Bernoulli(a),
        "gaussian": lambda: D.DiagonalGaussian(a, b),
        "tanh": lambda: D.TanhGaussian(a, b, low=-2.0, high=(1.0, 2.0, 3.0, 4.0)),
    }[kind]()


KINDS = ["categorical", "coin", "masked", "many", "multi", "bernoulli", "gaussian", "tanh"]


@pytest.mark.parametrize("kind", KINDS)
def test_sample_is_sample_with_noise_for_any_batch_axes(kind):
    @jax.jit
    def everything(d):
        action = d.sample(KEY)
        again = d.sample_with(d.noise(KEY))
        return action, again, d.mode(), d.log_prob(action), d.entropy(), d.kl(d)

    action, again, mode, *per_row = everything(make(kind, ()))
    assert all(x.shape == () for x in per_row)
    d = make(kind, (3, 2))
    action, again, mode, *per_row = everything(d)
    np.testing.assert_array_equal(action, again)
    assert (mode.shape, mode.dtype) == (action.shape, action.dtype)
    assert all(x.shape == (3, 2) for x in per_row)
    flat = jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), d)
    merged = jax.jit(type(d).log_prob)(flat, action.reshape(6, *action.shape[2:]))
    np.testing.assert_allclose(per_row[0].reshape(6), merged, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_noise_has_the_prefix_and_needs_shapes_only(kind):
    d = make(kind)
    noise = jax.jit(lambda: jax.eval_shape(lambda: d).noise(KEY, (7,)))()
    np.testing.assert_array_equal(noise, jax.jit(lambda d: d.noise(KEY, (7,)))(d))
    assert noise.shape == (7, *jax.eval_shape(lambda: d.noise(KEY)).shape)
    actions = jax.jit(jax.vmap(d.sample_with))(noise)
    assert actions.shape == (7, *d.mode().shape)
    assert len(np.unique(np.asarray(actions).reshape(7, -1), axis=0)) > 1


def rows(d, index, count):
    """One row of a distribution, `count` times."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x[index][None], (count, *x.shape[1:])), d)


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_and_kl_are_expectations_over_samples(kind):
    d, other = make(kind), make(kind, seed=10)

    @jax.jit
    def run(d, other):
        many = rows(d, 1, 40_000)
        action = many.sample(KEY)
        log_p, log_q = many.log_prob(action), rows(other, 1, 40_000).log_prob(action)
        return log_p, log_q, d.entropy()[1], d.kl(other)[1], d.kl(d)

    log_p, log_q, entropy, kl, zero = (np.asarray(x, np.float64) for x in run(d, other))
    assert abs(-log_p.mean() - entropy) < 4 * log_p.std() / 200 + 2e-3
    assert abs((log_p - log_q).mean() - kl) < 4 * (log_p - log_q).std() / 200 + 2e-3
    np.testing.assert_allclose(zero, 0, atol=1e-6)


@pytest.mark.parametrize("kind", ["categorical", "coin", "masked", "many"])
def test_samples_have_the_right_frequencies(kind):
    d = make(kind)
    count = 40_000
    many = rows(d, 0, count)
    got = np.bincount(np.asarray(many.sample(KEY)), minlength=d.logits.shape[-1]) / count
    p = np.asarray(d.probs()[0])
    assert (np.abs(got - p) <= 5 * np.sqrt(p * (1 - p) / count) + 1e-9).all()


def test_categorical_equals_distrax():
    logits, other = normal(0, 6, 5), normal(1, 6, 5)
    ours, theirs = D.Categorical(logits), distrax.Categorical(logits)
    action = jnp.arange(6) % 5
    np.testing.assert_allclose(ours.log_prob(action), theirs.log_prob(action), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-5)
    np.testing.assert_array_equal(ours.mode(), theirs.mode())
    expected = theirs.kl_divergence(distrax.Categorical(other))
    np.testing.assert_allclose(ours.kl(D.Categorical(other)), expected, rtol=1e-4, atol=1e-6)


def test_bernoulli_equals_distrax():
    logits, other = normal(0, 6, 3), normal(1, 6, 3)
    theirs = distrax.Independent(distrax.Bernoulli(logits), 1)
    ours = D.Bernoulli(logits)
    action = jnp.asarray(np.random.default_rng(0).integers(0, 2, (6, 3)))
    np.testing.assert_allclose(ours.log_prob(action), theirs.log_prob(action), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-5)
    expected = distrax.Bernoulli(logits).kl_divergence(distrax.Bernoulli(other)).sum(-1)
    np.testing.assert_allclose(ours.kl(D.Bernoulli(other)), expected, rtol=1e-4, atol=1e-6)


def test_gaussian_equals_scipy_and_distrax():
    d, other = make("gaussian"), make("gaussian", seed=4)
    x = normal(9, 5, 4)
    expected = scipy.stats.norm.logpdf(x, d.mean, np.exp(d.log_std)).sum(-1)
    np.testing.assert_allclose(d.log_prob(x), expected, rtol=1e-5)
    expected = scipy.stats.norm.entropy(d.mean, np.exp(d.log_std)).sum(-1)
    np.testing.assert_allclose(d.entropy(), expected, rtol=1e-5)
    a, b = (distrax.MultivariateNormalDiag(g.mean, jnp.exp(g.log_std)) for g in (d, other))
    np.testing.assert_allclose(d.kl(other), a.kl_divergence(b), rtol=1e-4)


def test_tanh_density_equals_distrax_and_integrates_to_one():
    d = D.TanhGaussian(normal(0, 5, 1), 0.3 * normal(1, 5, 1), low=-2.0, high=3.0)
    base = distrax.MultivariateNormalDiag(d.mean, jnp.exp(d.log_std))
    squash = distrax.Chain([distrax.ScalarAffine(0.5, 2.5), distrax.Tanh()])
    theirs = distrax.Transformed(base, distrax.Block(squash, 1))
    action = d.sample(KEY)
    np.testing.assert_allclose(d.log_prob(action), theirs.log_prob(action), rtol=1e-4, atol=1e-4)
    edges = np.linspace(-2, 3, 20_001)
    centers = jnp.asarray((edges[1:] + edges[:-1]) / 2, jnp.float32)[:, None]
    density = np.exp(rows(d, 0, len(centers)).log_prob(centers))
    assert abs(density.sum() * (edges[1] - edges[0]) - 1) < 1e-3


@pytest.mark.parametrize(("std", "error"), [(0.02, 5e-3), (1.0, 5e-3), (2.0, 5e-3), (4.0, 0.06)])
def test_tanh_entropy_is_the_integral_within_the_documented_error(std, error):
    means = np.linspace(-10, 10, 41)
    x = means + np.linspace(-10 * std, 10 * std, 20_001)[:, None]
    slope = 2 * (np.log(2) - x - np.logaddexp(0, -2 * x))
    step = 20 * std / 20_000
    expected = scipy.stats.norm.entropy(0, std)
    expected = expected + (scipy.stats.norm.pdf(x, means, std) * slope).sum(0) * step
    mean = jnp.asarray(means, jnp.float32)[:, None]
    d = D.TanhGaussian(mean, jnp.full_like(mean, np.log(std)))
    np.testing.assert_allclose(d.entropy(), expected, atol=error, rtol=0)


def test_tanh_entropy_and_log_prob_of_bfloat16_inputs_are_as_exact_as_float32():
    shape = (64, 6)
    mean = jax.random.normal(KEY, shape).astype(jnp.bfloat16)
    log_std = (0.5 * jax.random.normal(jax.random.key(1), shape)).astype(jnp.bfloat16)
    d = D.TanhGaussian(mean, log_std, low=-2.0, high=2.0)
    mu, std = np.asarray(mean, np.float64), np.exp(np.asarray(log_std, np.float64))
    nodes, weights = np.polynomial.hermite_e.hermegauss(16)
    x = mu + std * nodes[:, None, None]
    slope = 2 * (np.log(2) - x - np.logaddexp(0, -2 * x)) + np.log(2)
    expected = scipy.stats.norm.entropy(mu, std) + np.einsum(
        "n,nbk->bk", weights / weights.sum(), slope
    )
    np.testing.assert_allclose(d.entropy(), expected.sum(-1), atol=1e-5, rtol=1e-5)
    assert d.entropy().dtype == jnp.float32
    action = d.sample(KEY).at[0].set(2)  # rounding puts samples on the bound
    assert np.isfinite(d.log_prob(action)).all()


def test_tanh_is_finite_at_and_beyond_the_bounds():
    space = spaces.Box.create([-2.0, 0.0], [2.0, 100.0])
    kind = D.distribution_for(space, squash=True)
    low, high = space.bounds()

    def density(outputs, action):
        return kind.build(outputs, jnp.zeros(2)).log_prob(action)

    for action in (low, high, high + 1):
        action = jnp.asarray(action, jnp.float32)
        grad = jax.grad(density)(jnp.array([0.0, 30.0]), action)
        assert np.isfinite(density(jnp.array([0.0, 30.0]), action))
        assert np.isfinite(grad).all()
    sure = kind.build(jnp.full((1000, 2), 50.0), jnp.zeros(2))
    assert space.contains(sure.sample(KEY))
    # A stored action scores as the number it was drawn from.
    d = kind.build(normal(0, 1000, 2), jnp.zeros(2))
    x = d.base.sample_with(d.noise(KEY))
    exact = d.base.log_prob(x) - jnp.sum(continuous._log_slope(x), -1) - np.log(2.0) - np.log(50.0)
    inner = np.abs(x).max(-1) < 5.5
    assert inner.sum() > 990
    got = d.log_prob(d.sample(KEY))
    np.testing.assert_allclose(got[inner], exact[inner], atol=1e-2)


@jax.jit
def _sample_200(d):
    return jax.vmap(d.sample_with)(d.noise(KEY, (200,)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=3, max_size=3))
def test_masked_actions_never_happen_and_nothing_is_nan(mask):
    allowed = np.asarray(mask)
    allowed[:, 0] |= ~allowed.any(-1)
    d = D.Categorical.create(3 * normal(0, 3, 5), jnp.asarray(allowed))
    assert (np.asarray(d.probs())[~allowed] == 0).all()
    np.testing.assert_allclose(d.probs().sum(-1), 1, rtol=1e-5)
    actions = np.asarray(_sample_200(d))
    assert allowed[np.arange(3)[None].repeat(200, 0), actions].all()
    assert allowed[np.arange(3), np.asarray(d.mode())].all()
    expected = [scipy.stats.entropy(p[a]) for p, a in zip(np.asarray(d.probs()), allowed)]
    np.testing.assert_allclose(d.entropy(), expected, atol=1e-5)


@pytest.mark.parametrize("n", [2, 5, 50])
def test_extreme_noise_never_takes_a_masked_action(n):
    mask = np.zeros((3, n), bool)
    mask[0, 0] = mask[1, -1] = mask[2, n // 2] = True
    d = D.Categorical.create(normal(0, 3, n), jnp.asarray(mask))
    extremes = (-80.0, 80.0) if n == 2 else (0.0, 1 - 2**-23)
    for u in extremes:
        action = d.sample_with(jnp.full(3, u, jnp.float32))
        np.testing.assert_array_equal(action, [0, n - 1, n // 2])


@pytest.mark.parametrize("allowed", [(True, False, True), (True,) * 3])
def test_gradients_through_masks_are_finite_and_skip_masked_logits(allowed):
    mask = jnp.asarray([allowed])
    other = D.Categorical(normal(3, 1, 3))

    def score(logits):
        d = D.Categorical.create(logits, mask)
        return jnp.sum(d.entropy() + d.kl(other) + d.log_prob(jnp.array([0])))

    grad = np.asarray(jax.grad(score)(normal(0, 1, 3)))
    assert np.isfinite(grad).all()
    assert (grad[:, ~np.asarray(allowed)] == 0).all()


@pytest.mark.parametrize("n", [2, 3, 50])
def test_a_mask_that_allows_nothing_makes_its_row_and_its_gradient_nan(n):
    mask = jnp.ones((2, n), bool).at[1].set(False)

    def log_prob(logits):
        return D.Categorical.create(logits, mask).log_prob(jnp.zeros(2, jnp.int32))

    logits = normal(0, 2, n)
    assert np.isfinite(log_prob(logits)).tolist() == [True, False]
    grad = np.asarray(jax.grad(lambda x: log_prob(x).sum())(logits))
    assert np.isfinite(grad[0]).all()
    assert np.isnan(grad[1]).all()
    d = D.Categorical.create(logits, mask)
    assert np.isfinite(d.entropy()).tolist() == [True, False]
    assert ((d.sample(KEY) >= 0) & (d.sample(KEY) < n)).all()
    assert 0 <= int(d.mode()[1]) < n


def test_multi_categorical_is_the_product_of_its_entries():
    parts = [normal(0, 6, 2), normal(1, 6, 4), normal(2, 6, 3)]
    d = D.MultiCategorical.create(parts, (2, 4, 3))
    action = d.sample(KEY)
    assert (np.asarray(action) < [2, 4, 3]).all()
    entries = [D.Categorical(p) for p in parts]
    expected = sum(e.log_prob(action[:, i]) for i, e in enumerate(entries))
    np.testing.assert_allclose(d.log_prob(action), expected, rtol=1e-5)
    np.testing.assert_allclose(d.entropy(), sum(e.entropy() for e in entries), rtol=1e-5)


def test_multi_categorical_mask_that_allows_nothing_makes_its_row_nan():
    mask = jnp.array([[False, False, False, True, False], [True] * 5])
    d = D.MultiCategorical.create(jnp.zeros((2, 5)), (2, 3), mask)
    np.testing.assert_allclose(d.entries.probs()[0], [[np.nan] * 3, [0, 1, 0]])
    action = d.sample(KEY)
    assert np.isfinite(d.log_prob(action)).tolist() == [False, True]
    assert (np.asarray(action) < [2, 3]).all()


def test_distribution_for_picks_by_space():
    box = spaces.Box.create(-1.0, 1.0, (2, 3))
    kinds = {
        spaces.Discrete(3): (D.Categorical, 3),
        spaces.MultiDiscrete((2, 3)): (D.MultiCategorical, 5),
        spaces.MultiBinary(4): (D.Bernoulli, 4),
        box: (D.DiagonalGaussian, 6),
    }
    for space, (cls, size) in kinds.items():
        kind = D.distribution_for(space)
        d = kind.build(jnp.zeros((7, size)), jnp.zeros(size))
        assert isinstance(d, cls)
        assert kind.num_outputs == size
        assert d.sample(KEY).shape == (7, *space.shape)
        assert kind == D.distribution_for(space)
    squashed = D.distribution_for(box, squash=True).build(jnp.zeros((7, 6)), jnp.zeros(6))
    assert isinstance(squashed, D.TanhGaussian)
    assert squashed.log_prob(squashed.sample(KEY)).shape == (7,)


def test_bad_spaces_and_masks_are_named():
    with pytest.raises(ValueError, match="Discrete, MultiDiscrete, MultiBinary or Box"):
        D.distribution_for(spaces.Dict.create({"a": spaces.Discrete(2)}))
    with pytest.raises(ValueError, match="MultiDiscrete"):
        D.distribution_for(spaces.Box.create(0, 5, (2,), np.int32))
    with pytest.raises(ValueError, match="squash=False"):
        D.distribution_for(spaces.Box.create(-np.inf, np.inf, (2,)), squash=True)
    with pytest.raises(ValueError, match=r"\(4, 3\), got \(4, 2\)"):
        D.Categorical.create(jnp.zeros((4, 3)), jnp.ones((4, 2), bool))
    with pytest.raises(ValueError, match="action mask needs"):
        D.distribution_for(spaces.MultiBinary(2)).build(jnp.zeros(2), mask=jnp.ones(2, bool))
    with pytest.raises(ValueError, match="same bounds"):
        make("tanh").kl(D.TanhGaussian(jnp.zeros((5, 4)), jnp.zeros((5, 4))))
