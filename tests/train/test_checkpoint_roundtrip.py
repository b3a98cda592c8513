import hashlib
import json
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jaxroll.train import step_files
from jaxroll.train.checkpoint import (
    Checkpointer,
    MismatchError,
    NoCheckpointError,
)
from jaxroll.train.states import load_pytree, save_pytree
from jaxroll.types import Node

INTEGERS = ["int4", *(f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64))]
FLOATS = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64"]
DTYPES = ["bool", *INTEGERS, *FLOATS, "complex64", "complex128"]


class Pair(NamedTuple):
    left: Any
    right: Any


class Inner(Node):
    weight: Any
    nothing: Any = None


class State(Node):
    shared: Any
    actors: Any
    empty: Any = ()


def bits(tree):
    """Every leaf as (dtype, shape, bytes), keys as their data."""

    def one(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return str(x.dtype), x.shape, np.asarray(jax.random.key_data(x)).tobytes()
        return str(np.asarray(x).dtype), np.shape(x), np.asarray(x).tobytes()

    return jax.tree.map(one, tree)


def make_state(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "Dense_0": {"kernel": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)},
        "a/b": jnp.asarray(rng.normal(size=3), jnp.bfloat16),
    }
    return State(
        shared={"params": params, "opt": optax.adam(1e-3).init(params), "none": None},
        actors=Pair(
            Inner(weight=jax.random.split(jax.random.key(seed), 4)),
            [np.arange(6, dtype=np.uint8).reshape(2, 3) + seed, {}, np.float64(0.1), 3, 2.5, True],
        ),
    )


def blank(tree):
    """The same structure with other values."""

    def one(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(99), x.shape)
        return (
            type(x)(0)
            if isinstance(x, bool | int | float)
            else np.zeros_like(x)[()]
            if (isinstance(x, np.generic))
            else x * 0
        )

    return jax.tree.map(one, tree)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(tmp_path, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.random.default_rng(0).integers(0, 2, (3, 5)).astype(dtype)
    save_pytree(tmp_path / "x", {"x": x, "scalar": x[0, 0].reshape(())})
    loaded, _ = load_pytree(tmp_path / "x", {"x": np.zeros_like(x), "scalar": np.zeros((), dtype)})
    assert bits(loaded) == bits({"x": x, "scalar": x[0, 0].reshape(())})


def test_negative_zeros_nan_payloads_and_empty_arrays_come_back(tmp_path):
    nan = np.array([0x7FC00001, 0xFFC00002, 0x80000000], np.uint32).view(np.float32)
    tree = {"nan": nan, "zero": np.full(4, -0.0), "none": np.zeros((0, 3), np.uint8)}
    save_pytree(tmp_path / "x", tree)
    loaded, _ = load_pytree(tmp_path / "x", jax.tree.map(np.zeros_like, tree))
    assert bits(loaded) == bits(tree)


def test_whole_state_comes_back_with_its_structure_and_kinds(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, config={"lr": 0.1, "sizes": (64, 64)}, metrics={"r": 1.5})
    step, restored, metadata = Checkpointer(tmp_path).restore(blank(state))
    assert step == 7
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state)):
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
        assert isinstance(b, jax.Array) or type(a) is type(b)
    assert metadata["config"] == {"lr": 0.1, "sizes": [64, 64]}
    assert metadata["metrics"] == {"r": 1.5}
    assert {"jaxroll_version", "format_version", "created"} <= metadata.keys()


def test_abstract_template_is_enough(tmp_path):
    state = {"w": jnp.arange(4.0), "key": jax.random.key(3), "rbg": jax.random.key(1, impl="rbg")}
    save_pytree(tmp_path / "x", state)
    loaded, _ = load_pytree(tmp_path / "x", jax.eval_shape(lambda: state))
    assert bits(loaded) == bits(state)
    assert jax.random.uniform(loaded["key"]) == jax.random.uniform(state["key"])


def test_tree_without_leaves_can_be_saved(tmp_path):
    save_pytree(tmp_path / "x", {"none": None, "empty": ()}, {"a": 1})
    assert load_pytree(tmp_path / "x", {"none": None, "empty": ()}) == (
        {"none": None, "empty": ()},
        {"a": 1},
    )


def test_restored_uncommitted_leaf_stays_uncommitted(tmp_path):
    # Committed leaves could not be moved to a mesh, and would cost a second compilation.
    state = {"w": jnp.arange(4.0)}
    save_pytree(tmp_path / "x", state)
    loaded, _ = load_pytree(tmp_path / "x", state)
    assert not loaded["w"].committed


def test_state_may_be_donated_or_overwritten_right_after_save(tmp_path):
    update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = {f"{i}": jnp.full((64, 64), float(i)) for i in range(20)}
    host = np.zeros(1000)
    expected = bits(state)
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            checkpointer.save(step, {"state": state, "host": host})
            pointer = state["0"].unsafe_buffer_pointer()
            old, state = state, update(state)
            host += 1
            assert old["0"].is_deleted()
            assert state["0"].unsafe_buffer_pointer() == pointer  # donated in place all the same
    like = {"state": jax.tree.map(np.asarray, state), "host": host}
    for step in range(3):
        got = Checkpointer(tmp_path).restore(like, step=step).state
        assert (got["host"] == step).all()
        assert all((x == i + step).all() for i, x in ((int(k), x) for k, x in got["state"].items()))
    assert bits(Checkpointer(tmp_path).restore(like, step=0).state["state"]) == expected


@pytest.mark.parametrize("saved_on", [1, 4])
@pytest.mark.parametrize("restored_on", [1, 2, 8])
def test_state_moves_to_another_mesh(tmp_path, saved_on, restored_on):
    def mesh(n):
        kinds = (jax.sharding.AxisType.Auto,)
        return jax.make_mesh((n,), ("actors",), axis_types=kinds, devices=jax.devices()[:n])

    def spread(n):
        return {
            "shared": jax.NamedSharding(mesh(n), jax.P()),
            "actors": jax.NamedSharding(mesh(n), jax.P("actors")),
        }

    state = {
        "shared": {"w": jnp.arange(12.0).reshape(3, 4)},
        "actors": {
            "x": jnp.arange(16).reshape(8, 2),
            "key": jax.random.split(jax.random.key(0), 8),
        },
    }
    expected = bits(state)
    placed = {k: jax.device_put(state[k], s) for k, s in spread(saved_on).items()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, placed)
    abstract = jax.eval_shape(lambda: state)
    restored = Checkpointer(tmp_path).restore(abstract, shardings=spread(restored_on)).state
    assert bits(restored) == expected
    for name in ("x", "key"):
        assert len(restored["actors"][name].sharding.device_set) == restored_on
        assert restored["actors"][name].sharding.is_equivalent_to(
            spread(restored_on)["actors"], restored["actors"][name].ndim
        )
    # The template's own shardings serve as well.
    again = Checkpointer(tmp_path).restore(restored).state
    assert bits(again) == expected
    assert again["actors"]["x"].sharding == restored["actors"]["x"].sharding


def test_leaf_in_several_shards_is_put_together_for_any_mesh(tmp_path):
    x = np.arange(48, dtype=np.int32).reshape(8, 6)
    template = jax.ShapeDtypeStruct(x.shape, x.dtype)
    snapshot = step_files.take_snapshot({"x": x}, {})
    corners = [(0, 3, 0, 4), (0, 3, 4, 6), (3, 8, 0, 1), (3, 8, 1, 6)]
    shards = [step_files.Shard("x", [a, c], x[a:b, c:d]) for a, b, c, d in corners]
    step_files.write_step(tmp_path / "x", snapshot._replace(shards=shards), "shards")
    assert bits(load_pytree(tmp_path / "x", {"x": x * 0})[0]) == bits({"x": x})
    for shape, spec in (((8,), jax.P("a")), ((2,), jax.P(None, "a")), ((4, 2), jax.P("a", "b"))):
        kinds = (jax.sharding.AxisType.Auto,) * len(shape)
        devices = jax.devices()[: np.prod(shape)]
        mesh = jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=kinds, devices=devices)
        where = jax.NamedSharding(mesh, spec)
        loaded, _ = load_pytree(tmp_path / "x", {"x": template}, shardings=where)
        assert bits(loaded) == bits({"x": x})
        assert loaded["x"].sharding == where


def test_another_architecture_names_leaves_and_shapes(tmp_path):
    save_pytree(tmp_path / "x", {"a": np.zeros((4, 64), np.float32), "old": np.zeros(2)})
    with pytest.raises(MismatchError) as error:
        load_pytree(tmp_path / "x", {"a": np.zeros((4, 32), np.float32), "new": np.zeros(3)})
    text = str(error.value)
    assert "a: saved float32[4, 64], expected float32[4, 32]" in text
    assert "new: saved nothing, expected float64[3]" in text
    assert "old: saved float64[2], expected nothing" in text


def test_many_mismatches_are_cut_short(tmp_path):
    save_pytree(tmp_path / "x", {f"{i}": np.zeros(2) for i in range(30)})
    with pytest.raises(MismatchError, match="and 22 more"):
        load_pytree(tmp_path / "x", {f"{i}": np.zeros(3) for i in range(30)})


@pytest.mark.parametrize(
    "like",
    [np.zeros(3, np.float16), np.zeros(3, np.int32), jnp.zeros(3, jnp.bfloat16), np.zeros((3, 1))],
)
def test_wrong_dtype_or_rank_is_refused_not_cast(tmp_path, like):
    save_pytree(tmp_path / "x", {"w": np.arange(3, dtype=np.float32)})
    with pytest.raises(MismatchError, match=r"w: saved float32\[3\]"):
        load_pytree(tmp_path / "x", {"w": like})


def test_key_of_another_kind_is_refused(tmp_path):
    save_pytree(tmp_path / "x", {"key": jax.random.key(0)})
    for like in (jax.random.key(0, impl="rbg"), jax.random.key_data(jax.random.key(0))):
        with pytest.raises(MismatchError, match="key<fry>"):
            load_pytree(tmp_path / "x", {"key": like})


def test_float64_is_not_narrowed_to_a_device(tmp_path):
    save_pytree(tmp_path / "x", {"w": np.zeros(3)})
    with pytest.raises(MismatchError, match="jax_enable_x64"):
        load_pytree(tmp_path / "x", {"w": jax.ShapeDtypeStruct((3,), np.dtype("float64"))})


@pytest.mark.parametrize("leaf", ["text", object(), np.array([None]), np.array(["a"])])
def test_what_is_no_array_is_refused_by_path(tmp_path, leaf):
    with pytest.raises(TypeError, match="'a/b'"):
        Checkpointer(tmp_path).save(0, {"a": {"b": leaf}})


def test_ambiguous_paths_config_and_steps_are_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(ValueError, match="'a/b'"):
        checkpointer.save(0, {"a": {"b": np.ones(1)}, "a/b": np.ones(1)})
    with pytest.raises(TypeError, match="config must hold"):
        checkpointer.save(0, {}, config={"f": print})
    with pytest.raises(TypeError, match="config must be a dict"):
        checkpointer.save(0, {}, config=[1])
    with pytest.raises(ValueError, match="step"):
        checkpointer.save(-1, {})
    assert checkpointer.steps() == []


def test_params_alone_go_into_another_run(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, state, config={"agent": "ppo"})
        params = checkpointer.restore(blank(state.shared["params"]), subtree="shared/params").state
    assert bits(params) == bits(state.shared["params"])
    # By path: a run's directory, and one of its steps.
    for path in (tmp_path, tmp_path / "0000000005"):
        like = blank(state.shared["params"])
        params, config = load_pytree(path, like, subtree="shared/params")
        assert bits(params) == bits(state.shared["params"])
        assert config == {"agent": "ppo"}
    wrong = {**like, "Dense_0": {"kernel": jnp.zeros((5, 8))}}
    with pytest.raises(MismatchError, match=r"Dense_0/kernel: saved float32\[4, 8\], expected"):
        checkpointer.restore(wrong, subtree="shared/params")
    with pytest.raises(MismatchError, match="no subtree 'shared/theta'"):
        checkpointer.restore(like, subtree="shared/theta")


def test_single_tree_is_overwritten_only_on_request(tmp_path):
    path = tmp_path / "deep" / "model"
    save_pytree(path, {"w": np.ones(3)})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_pytree(path, {"w": np.zeros(3)})
    save_pytree(path, {"w": np.full(3, 2.0)}, overwrite=True)
    assert load_pytree(path, {"w": np.zeros(3)})[0]["w"].tolist() == [2, 2, 2]
    assert [p.name for p in path.parent.iterdir()] == ["model"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match="is no checkpoint"):
        save_pytree(tmp_path / "mine", {"w": np.ones(3)}, overwrite=True)


def test_nothing_there_is_its_own_error(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NoCheckpointError):
            Checkpointer(path).restore({})
        with pytest.raises(NoCheckpointError):
            load_pytree(path, {})
    with pytest.raises(FileNotFoundError):
        Checkpointer(tmp_path).restore({}, step=3)


def test_reading_never_unpickles(tmp_path, monkeypatch):
    state = make_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert bits(Checkpointer(tmp_path).restore(blank(state)).state) == bits(state)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not [p for p in files if p.suffix in (".pkl", ".pickle", ".npy", ".py")]


def test_manifest_describes_files_and_leaves(tmp_path):
    save_pytree(tmp_path / "x", {"w": np.ones((2, 3), np.float32), "key": jax.random.key(0)})
    body = json.loads((tmp_path / "x" / "manifest.json").read_text())["manifest"]
    assert body["leaves"] == {"key": "key<fry>[]", "w": "float32[2, 3]"}
    on_disk = {p.relative_to(tmp_path / "x").as_posix(): p for p in (tmp_path / "x").rglob("*")}
    files = {n for n, p in on_disk.items() if p.is_file()} - {step_files.MANIFEST}
    assert body["files"].keys() == files
    for name in files:
        assert body["files"][name] == hashlib.sha256(on_disk[name].read_bytes()).hexdigest()
