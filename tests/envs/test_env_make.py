"""Names, sources, and what is said of wrong ones."""

import importlib.util

import pytest

from jaxroll.envs import Source, list_envs, make as make_module, make_env, register_source


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(make_module, "_registered", {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPol-v1", "'CartPol-v1' is not an environment of gymnax. Did you mean 'CartPole-v1'"),
        ("cartpole", "Did you mean 'CartPole-v1'"),
        ("Breakout", "Did you mean 'Breakout-MinAtar'"),
        ("gymnasium:Acrobat-v1", "not an environment of gymnasium. Did you mean 'Acrobot-v1'"),
        ("gymnasum:CartPole-v1", "not a source of environments. Did you mean 'gymnasium'"),
        ("LunarLander-v3", r"Another source has it: make_env\('gymnasium:LunarLander-v3'\)"),
    ],
)
def test_an_unknown_name_has_near_matches(name, message):
    with pytest.raises(ValueError, match=message):
        make_env(name)


def test_a_wrong_option_is_not_taken_for_a_wrong_name():
    with pytest.raises(ValueError, match=r"no option 'gravty'\. Did you mean 'gravity'") as caught:
        make_env("CartPole-v1", gravty=1.0)
    assert "Another source" not in str(caught.value)


@pytest.mark.parametrize("source", ["gymnasium", "envpool"])
def test_a_source_that_is_not_installed_names_its_extra(monkeypatch, source):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == source else find(name, *a)
    )
    with pytest.raises(ImportError, match=rf'pip install "jaxroll\[{source}\]"'):
        make_env(f"{source}:CartPole-v1")
    assert not [name for name in list_envs() if name.startswith(f"{source}:")]
    assert "CartPole-v1" in list_envs()


def test_ale_that_is_not_installed_names_its_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "ale_py" else find(name, *a)
    )
    with pytest.raises(ImportError, match=r'pip install "jaxroll\[atari\]"'):
        make_env("gymnasium:ALE/Breakout-v5")


def test_a_source_is_added_by_registering_it():
    made = []
    source = Source(
        "mine",
        package="json",
        extra=None,
        make=lambda name, **options: made.append((name, options)) or "an environment",
        names=lambda: ["Corridor"],
    )
    register_source(source)
    assert make_env("mine:Corridor", length=3) == "an environment"
    assert made == [("Corridor", {"length": 3})]
    assert list_envs("mine") == ["mine:Corridor"]
    with pytest.raises(ValueError, match=r"make_env\('mine:Corridor'\)"):
        make_env("Corridor")


def test_names_are_listed_with_the_prefix_of_their_source():
    names = list_envs()
    assert "CartPole-v1" in names
    assert "gymnasium:CartPole-v1" in names
    assert list_envs("gymnax") == [n for n in names if ":" not in n]


def test_a_list_of_names_prints_by_source_in_short_lines():
    names = list_envs()
    assert isinstance(names, list)
    lines = repr(names).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 40
    assert lines[0].startswith("gymnax (26): Acrobot-v1, ")
    assert "more: list_envs('gymnasium')" in repr(names)
    assert "more" not in repr(list_envs("gymnasium"))
    with pytest.raises(TypeError, match="source must be the name of a source, got 3"):
        list_envs(3)  # pyright: ignore


def test_a_name_must_be_a_string():
    with pytest.raises(TypeError, match="takes a name"):
        make_env(make_env("CartPole-v1"))  # pyright: ignore
