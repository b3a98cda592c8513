import errno
import json
import os
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.train import step_files
from jaxroll.train.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointWarning,
    DamagedError,
    MismatchError,
)
from jaxroll.train.states import load_pytree, save_pytree


def state_of(step):
    rng = np.random.default_rng(step)
    return {
        "w": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
        "obs": rng.integers(0, 255, (32, 4)).astype(np.uint8),
        "key": jax.random.key_data(jax.random.key(step)),
        "count": np.int32(step),
    }


def equal(a, b):
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    directory = tmp_path_factory.mktemp("intact")
    with Checkpointer(directory) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, state_of(step), config={"seed": step})
    return directory


def damage(directory, rng):
    """One random harm to one random file; returns the file."""
    files = sorted(p for p in directory.glob("0*/**/*") if p.is_file())
    path = files[rng.integers(len(files))]
    data = bytearray(path.read_bytes())
    kind = ("truncate", "flip", "remove", "append")[rng.integers(4)]
    if kind == "truncate":
        data = data[: rng.integers(len(data))]
    elif kind == "flip":
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    elif kind == "append":
        data += b"\0"
    path.unlink()
    if kind != "remove":
        path.write_bytes(data)
    return path


def check_damage(intact, tmp_path, seed):
    rng = np.random.default_rng(seed)
    directory = tmp_path / "run"
    shutil.copytree(intact, directory)
    harmed = {int(damage(directory, rng).relative_to(directory).parts[0])}
    if seed % 3 == 0:
        harmed.add(int(damage(directory, rng).relative_to(directory).parts[0]))
    like = jax.tree.map(lambda x: x * 0, state_of(0))
    for step in (10, 20, 30):
        try:
            restored = Checkpointer(directory).restore(like, step=step)
        except CheckpointError:
            assert step in harmed
        else:  # a flipped bit in the manifest's white space harms nothing
            assert equal(restored.state, state_of(step))
            assert restored.metadata["config"] == {"seed": step}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        step, state, _ = Checkpointer(directory).restore(like)
    assert equal(state, state_of(step))
    assert step >= max({10, 20, 30} - harmed)


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_is_never_restored_silently(intact, tmp_path, seed):
    check_damage(intact, tmp_path, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 200))
def test_random_damage_is_never_restored_silently_many_times(intact, tmp_path, seed):
    check_damage(intact, tmp_path, seed)


@pytest.fixture
def run(intact, tmp_path):
    return shutil.copytree(intact, tmp_path / "run")


def flip_data(step_directory):
    largest = max(
        (p for p in step_directory.rglob("*") if p.is_file() and p.name != step_files.MANIFEST),
        key=lambda p: p.stat().st_size,
    )
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    return largest.name


def test_damaged_step_is_named_and_skipped(run):
    name = flip_data(run / "0000000030")
    with pytest.warns(CheckpointWarning, match=rf"step 30 is skipped: .*{name}.*step 20"):
        step, state, _ = Checkpointer(run).restore(state_of(0))
    assert step == 20
    assert equal(state, state_of(20))


def test_damaged_step_asked_for_is_an_error(run):
    flip_data(run / "0000000030")
    with pytest.raises(DamagedError, match="SHA-256"):
        Checkpointer(run).restore(state_of(0), step=30)


def test_all_damaged_is_an_error_that_names_each(run):
    for step in (10, 20, 30):
        flip_data(run / f"{step:010d}")
    with pytest.raises(DamagedError, match=r"(?s)0030.*0020.*0010"):
        Checkpointer(run).restore(state_of(0))


def test_step_without_manifest_does_not_exist(run):
    (run / "0000000030" / step_files.MANIFEST).unlink()
    assert Checkpointer(run).steps() == [10, 20]
    with pytest.warns(CheckpointWarning, match="no complete checkpoint"):
        assert Checkpointer(run).restore(state_of(0)).step == 20


def test_step_under_a_wrong_number_is_damaged(run):
    (run / "0000000030").rename(run / "0000000040")
    with pytest.raises(DamagedError, match="says that it is step 30"):
        Checkpointer(run).restore(state_of(0), step=40)


def test_damaged_steps_count_for_nothing_when_pruning(run):
    flip_data(run / "0000000030")
    checkpointer = Checkpointer(run, keep_latest=1)
    with pytest.warns(CheckpointWarning):
        checkpointer.restore(state_of(0))
    checkpointer.save(25, state_of(25))
    checkpointer.wait()
    assert checkpointer.steps() == [25]


def test_damaged_step_can_be_saved_again(run):
    flip_data(run / "0000000030")
    checkpointer = Checkpointer(run)
    with pytest.warns(CheckpointWarning):
        checkpointer.restore(state_of(0))
    checkpointer.save(30, state_of(30))
    restored = checkpointer.restore(state_of(0))
    assert restored.step == 30
    assert equal(restored.state, state_of(30))
    assert sorted(p.name for p in run.glob("0*")) == [f"{n:010d}" for n in (10, 20, 30)]


def test_step_complete_but_for_its_name_is_found_and_kept(run):
    # What a kill leaves between the manifest and the last renaming of a step saved again.
    (run / "0000000030").rename(run / "0000000030.replaced")
    checkpointer = Checkpointer(run)
    assert checkpointer.steps() == [10, 20, 30]
    assert equal(checkpointer.restore(state_of(0)).state, state_of(30))
    checkpointer.save(30, state_of(31))
    assert equal(checkpointer.restore(state_of(0), step=30).state, state_of(31))


def rewrite(step_directory, change):
    """A stranger's manifest: consistent in itself, whatever it says."""
    path = step_directory / step_files.MANIFEST
    body = json.loads(path.read_text())["manifest"]
    change(body)
    path.write_text(json.dumps({"sha256": step_files._digest(body), "manifest": body}))


@pytest.mark.parametrize(
    "name", ["../secret", "arrays/../../secret", "/etc/passwd", "a//b", "./x", "..\\x", "a\0b", ""]
)
def test_manifest_cannot_name_files_outside_of_its_step(run, name):
    (run / "secret").write_text("secret")
    rewrite(run / "0000000030", lambda body: body["files"].update({name: "0"}))
    with pytest.raises(DamagedError, match="is missing"):
        Checkpointer(run).restore(state_of(0), step=30)


def test_links_in_a_step_are_refused(run):
    path = run / "0000000030" / "arrays.0"
    path.rename(run / "elsewhere")
    os.symlink(run / "elsewhere", path)
    with pytest.raises(DamagedError, match=r"arrays\.0 is no regular file"):
        Checkpointer(run).restore(state_of(0), step=30)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(files=[]),
        lambda body: body.update(leaves=[]),
        lambda body: body.update(step="30"),
        lambda body: body.pop("config"),
        lambda body: body["files"].update(dict.fromkeys(body["files"], 3)),
        lambda body: body["files"].update({name: {} for name in body["files"]}),
        lambda body: body["shards"].pop(),
        lambda body: body["shards"][0].pop(),
        lambda body: body["shards"][0].__setitem__(1, "../secret"),
        lambda body: body["shards"][0].__setitem__(2, -1),
        lambda body: body["shards"][0].__setitem__(3, 1 << 60),
        lambda body: body["shards"][-1].__setitem__(4, [16, 0]),
        lambda body: body["shards"][-1].__setitem__(4, [0.0, 0.0]),
        lambda body: body["shards"][-1].__setitem__(5, [8, 16]),
        lambda body: body["shards"].append(body["shards"][0]),
    ],
)
def test_malformed_manifest_is_damage_not_a_crash(run, change):
    rewrite(run / "0000000030", change)
    with pytest.raises(DamagedError):
        Checkpointer(run).restore(state_of(0), step=30)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"sha256": 1}', "[" * 100_000, "\xff"])
def test_manifest_that_is_no_manifest_is_damage(run, text):
    (run / "0000000030" / step_files.MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedError, match="manifest"):
        Checkpointer(run).restore(state_of(0), step=30)


def test_manifest_that_lies_about_a_dtype_is_caught(run):
    def lie(body):
        body["leaves"]["w"] = "float16[16, 8]"

    rewrite(run / "0000000030", lie)
    like = {**state_of(0), "w": jnp.zeros((16, 8), jnp.float16)}
    with pytest.raises(DamagedError, match="cannot reshape array of size 256"):
        Checkpointer(run).restore(like, step=30)


@pytest.mark.parametrize("version", [2, 99])
def test_another_format_is_refused_and_never_pruned(run, version):
    rewrite(run / "0000000010", lambda body: body.update(format_version=version))
    with pytest.raises(CheckpointError, match=f"has format {version}, written by jaxroll"):
        Checkpointer(run).restore(state_of(0), step=10)
    with Checkpointer(run, keep_latest=1) as checkpointer:
        checkpointer.save(40, state_of(40))
    assert (run / "0000000010").is_dir()
    assert checkpointer.steps() == [40]


def test_single_tree_is_verified(tmp_path):
    save_pytree(tmp_path / "x", state_of(1))
    flip_data(tmp_path / "x")
    with pytest.raises(DamagedError):
        load_pytree(tmp_path / "x", state_of(0))


def test_array_larger_than_the_manifest_says_is_refused_before_it_is_read(run, monkeypatch):
    # A resealed file of a few kB could otherwise take gigabytes.
    with Checkpointer(run) as checkpointer:
        checkpointer.save(40, {"w": np.zeros(1 << 20, np.float32)})
    rewrite(run / "0000000040", lambda body: body["leaves"].update(w="float32[3]"))
    monkeypatch.setattr(step_files, "restore", lambda *a, **k: pytest.fail("was read"))
    with pytest.raises(DamagedError, match="w is not what its manifest says"):
        checkpointer.restore({"w": np.zeros(3, np.float32)}, step=40)


def test_step_of_another_run_is_refused_and_never_pruned(run, tmp_path):
    other = tmp_path / "other"
    with Checkpointer(other) as checkpointer:
        checkpointer.save(40, state_of(40))
    shutil.copytree(other / "0000000040", run / "0000000040")
    assert Checkpointer(run).steps() == [10, 20, 30]
    for read in (
        lambda: Checkpointer(run).restore(state_of(0)),
        lambda: load_pytree(run, state_of(0)),
        lambda: load_pytree(run / "0000000040", state_of(0)),
    ):
        with pytest.raises(MismatchError, match="is a step of another run"):
            read()
    with Checkpointer(run, keep_latest=1) as checkpointer:
        checkpointer.save(50, state_of(50))
    assert (run / "0000000040").is_dir()
    # Elsewhere, by its path, it can be loaded.
    moved = shutil.move(run / "0000000040", tmp_path / "moved")
    assert equal(load_pytree(moved, state_of(0))[0], state_of(40))


@pytest.mark.parametrize("name", ["manifest.json", "arrays.0"])
def test_what_may_not_be_read_is_not_called_damaged(run, monkeypatch, name):
    opened = Path.open

    def refuse(path, *args, **kwargs):
        if name in path.relative_to(run).parts[1:]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match="may not be read") as error:
        Checkpointer(run).restore(state_of(0))
    assert not isinstance(error.value, DamagedError)
