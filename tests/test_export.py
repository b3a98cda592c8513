"""An exported policy runs with JAX alone and acts as the agent does."""

import subprocess
import sys
import textwrap

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxroll
from jaxroll.export import export_policy

pytest.importorskip("flatbuffers")

RUN = """
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("jaxroll", "flax", "optax", "distrax"):
                raise ImportError(name)

    sys.meta_path.insert(0, Blocked())
    import numpy as np
    from jax import export
    policy = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
    obs = np.load(sys.argv[2])
    np.save(sys.argv[3], policy.call(obs))
"""


def make(**hyperparameters):
    agent = jaxroll.PPO.create(
        "CartPole-v1",
        num_envs=4,
        num_steps=8,
        num_mini_batch=1,
        hidden_sizes=(8,),
        **hyperparameters,
    )
    return agent, jax.jit(agent.init)(jax.random.key(3))


def test_a_feed_forward_policy_runs_without_jaxroll(tmp_path):
    agent, state = make(normalize_observations=True)
    file = export_policy(agent, state, tmp_path / "policy.bin")
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    np.save(tmp_path / "obs.npy", obs)
    subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(RUN),
            file,
            tmp_path / "obs.npy",
            tmp_path / "a.npy",
        ],
        check=True,
    )
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), agent.act(state)(obs))


def test_a_recurrent_policy_takes_and_returns_its_carry(tmp_path):
    agent, state = make(network="gru")
    file = agent.export(state, tmp_path / "policy.bin", batch_size=2)
    policy = jax.export.deserialize(bytearray(file.read_bytes()))
    act = agent.act(state)
    carry, mine = None, tuple(jnp.ones(x.shape, x.dtype) for x in policy.in_avals[1:-1])
    for t in range(3):
        obs = jnp.full((2, 4), 0.3 * t)
        is_first = jnp.full(2, t == 0)
        action, carry = act(obs, carry, is_first)
        exported, mine = policy.call(obs, mine, is_first)
        np.testing.assert_array_equal(exported, action)
        np.testing.assert_allclose(jax.tree.leaves(carry), mine, rtol=1e-5, atol=1e-6)


def test_a_policy_that_samples_follows_its_seed(tmp_path):
    agent, state = make()
    file = export_policy(agent, state, tmp_path / "policy.bin", deterministic=False)
    policy = jax.export.deserialize(bytearray(file.read_bytes()))
    obs = jnp.zeros((256, 4))
    actions = np.stack([policy.call(obs, jnp.uint32(seed)) for seed in (1, 1, 2)])
    np.testing.assert_array_equal(actions[0], actions[1])
    assert (actions[1] != actions[2]).any()
    assert 0 < actions.mean() < 1  # rows draw on their own


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"jaxroll\[export\]"):
        export_policy(None, None, tmp_path / "policy.bin")
    assert not list(tmp_path.iterdir())
