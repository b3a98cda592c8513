"""An exported policy runs with JAX alone and acts as the agent does."""

import hashlib
import subprocess
import sys
import textwrap

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxroll
from jaxroll.export import export_policy, load_policy

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


def write(path, data):
    """A file with a digest that is right."""
    path.write_bytes(data)
    path.with_name(path.name + ".sha256").write_text(hashlib.sha256(data).hexdigest())
    return path


def test_a_loaded_policy_acts_as_the_agent_does(tmp_path):
    agent, state = make()
    file = export_policy(agent, state, tmp_path / "policy.bin", deterministic=False)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (tmp_path / "policy.bin.sha256").read_text() == f"{digest}  policy.bin\n"
    policy = load_policy(file)
    assert policy.call(jnp.zeros((3, 4)), jnp.uint32(0)).shape == (3,)
    (tmp_path / "policy.bin.sha256").unlink()
    with pytest.raises(FileNotFoundError, match="Copy both files"):
        load_policy(file)
    load_policy(file, sha256=digest.upper())


def test_a_damaged_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    file = write(tmp_path / "policy.bin", b"some bytes")
    file.write_bytes(b"Some bytes")
    monkeypatch.setattr("jax.export.deserialize", lambda data: pytest.fail("was read"))
    with pytest.raises(ValueError, match="is damaged, or not what was exported"):
        load_policy(file)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        load_policy(file, sha256="abc")


@pytest.mark.parametrize("data", [b"", b"PK", bytes(range(256)) * 8])
def test_a_file_of_something_else_is_named(data, tmp_path):
    with pytest.raises(ValueError, match="is not an exported policy"):
        load_policy(write(tmp_path / "policy.bin", data))


def test_custom_calls_that_are_not_of_jax_are_refused(tmp_path):
    def native(x):
        return jax.ffi.ffi_call("any_native_function", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    allowed = [jax.export.DisabledSafetyCheck.custom_call("any_native_function")]
    export = jax.export.export(jax.jit(native), platforms=("cpu",), disabled_checks=allowed)
    file = write(tmp_path / "policy.bin", export(jnp.zeros(3)).serialize())
    with pytest.raises(ValueError, match="not JAX's own, any_native_function"):
        load_policy(file)


def test_custom_calls_of_jax_pass(tmp_path):
    exported = jax.export.export(
        jax.jit(lambda x: jnp.linalg.cholesky(x) + jax.random.normal(jax.random.key(0), (3, 3))),
        platforms=("cpu", "cuda"),
    )(jnp.eye(3))
    assert load_policy(write(tmp_path / "a", exported.serialize())).call(jnp.eye(3)).shape == (3, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"agent": 3}, "agent must be an agent"),
        ({"state": None}, "state must be the agent's TrainState"),
        ({"batch_size": True}, "batch_size must be an integer"),
        ({"deterministic": "no"}, "deterministic must be True or False"),
        ({"path": "gs://bucket/policy"}, "path must be a path on this machine"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, tmp_path):
    agent, state = make()
    right = {"agent": agent, "state": state, "path": tmp_path / "policy.bin"}
    with pytest.raises((TypeError, ValueError), match=message):
        export_policy(**{**right, **arguments})
