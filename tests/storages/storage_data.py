"""Random transitions for the tests of storages."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import Transition


def trajectory(seed=0, num_steps=5, num_envs=3, *, valid=False, truncation=True, **fields):
    """A [T, B] trajectory with a nested observation in two dtypes, as numpy arrays."""
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_envs)

    def floats(*more):
        return rng.normal(size=(*shape, *more)).astype(np.float32)

    out = Transition(
        obs={"vector": floats(2), "pixels": rng.integers(0, 255, (*shape, 2, 2), np.uint8)},
        action=rng.integers(0, 4, shape, np.int32),
        reward=floats(),
        terminated=rng.random(shape) < 0.2,
        truncated=rng.random(shape) < 0.2 if truncation else None,
        log_prob=floats(),
        value=floats(),
        bootstrap_value=floats() if truncation else None,
        valid=rng.random(shape) < 0.8 if valid else None,
        extras={"number": np.arange(num_steps * num_envs, dtype=np.int32).reshape(shape)},
    )
    return out.replace(**fields)


def step(tree, t=0):
    return jax.tree.map(lambda x: x[t], tree)


def add_all(storage, steps, carries=None):
    """Add each step within one scan."""

    def add(s, x):
        return (s.add(x) if carries is None else s.add(x[0], x[1])), None

    return jax.lax.scan(add, storage, steps if carries is None else (steps, carries))[0]


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b)):
        name = jax.tree_util.keystr(path)
        assert jnp.result_type(x) == jnp.result_type(y), name
        np.testing.assert_array_equal(x, y, err_msg=name)


def avals(tree):
    return jax.tree.structure(tree), [
        (jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)
    ]
