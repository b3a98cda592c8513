"""A config reads what it writes, and says what is wrong before anything is built."""

import dataclasses
import math
import re
import traceback

import numpy as np
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from jaxroll.agents import AGENTS
from jaxroll.checks import RENAMED
from jaxroll.config import Config, parse_value
from jaxroll.train.options import Options, fields_of
from jaxroll.trainer import DistributedTrainer

_text = st.text(st.characters(codec="utf-8"), max_size=20)
_scalars = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), _text)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def configs(draw):
    agent = draw(st.sampled_from(sorted(AGENTS)))
    optional_steps = st.none() | st.integers(1, 10**9)
    hyperparameters = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "discount": st.floats(0, 1),
                "learning_rate": st.floats(1e-8, 1e3),
                "decay_steps": st.none() | st.floats(1, 1e9),
                "num_envs": st.integers(1, 10**6),
                "hidden_sizes": st.none() | st.lists(st.integers(1, 512), max_size=3),
                "network": st.sampled_from(["auto", "mlp", "lstm"]),
                "normalize_observations": st.booleans(),
            },
        )
    )
    return Config(
        agent=agent,
        env=draw(_text.filter(lambda s: s not in ("", "none"))),  # "none" is None
        seed=draw(st.integers(0, 2**30)),
        num_seeds=draw(st.integers(1, 1000)),
        devices=draw(st.none() | st.integers(1, 64)),
        eval_interval=draw(optional_steps),
        checkpoint_interval=draw(optional_steps),
        target_return=draw(st.none() | st.floats(-1e6, 1e6)),
        loggers=draw(st.sampled_from([(), ("csv",), ("csv", "tensorboard")])),
        out=draw(
            st.none() | _text.filter(lambda s: s not in ("", "none") and not set(s) & {"\0", ":"})
        ),
        env_options=draw(st.dictionaries(_text, _values.filter(_no_none), max_size=3)),
        hyperparameters=hyperparameters,
    )


def _no_none(value):
    """Whether "none", which is read as None, is nowhere in it as a key's value."""
    return "none" not in repr(value)


@hypothesis_settings(deadline=None)
@given(configs())
def test_a_config_survives_toml_and_dicts(config):
    assert Config.from_toml(config.to_toml()) == config
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_toml(config.complete().to_toml()) == config.complete()


@hypothesis_settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from([f.name for f in dataclasses.fields(Config)])
        | st.sampled_from(["learning_rate", "num_step", "hyperparameters.discount"])
        | _text,
        _values | st.none() | st.floats(),
        max_size=4,
    )
)
def test_nonsense_is_refused_by_our_own_checks(values):
    try:
        config = Config.from_dict(values)
    except (ValueError, TypeError) as error:
        raised_by = traceback.extract_tb(error.__traceback__)[-1].filename
        assert "/jaxroll/" in raised_by
    else:
        assert Config.from_toml(config.to_toml()) == config


def test_every_setting_and_hyperparameter_has_help():
    for name, field in fields_of(Config).items():
        assert field.metadata["help"], name
    for cls in AGENTS.values():
        assert all(h.help for h in cls.hyperparameters().values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sed": 1}, "Did you mean 'seed'"),
        ({"agent": "pppo"}, "Did you mean 'ppo'"),
        ({"learning_rate": 1e-3}, r"below \[hyperparameters\]"),
        ({"hyperparameters": {"learning_rat": 1}}, "Did you mean 'learning_rate'"),
        ({"hyperparameters": {"learning_rate": -1}}, "learning_rate must be > 0, got -1"),
        ({"hyperparameters": {"learning_rate": [1, 2]}}, "sweep"),
        ({"hyperparameters": {"num_envs": 0.5}}, "num_envs must be an integer"),
        ({"hyperparameters": 3}, "must be a table"),
        ({"num_train_steps": 0}, "num_train_steps must be at least 1, got 0"),
        ({"num_train_steps": "many"}, "num_train_steps must be an integer"),
        ({"num_train_steps": True}, "num_train_steps must be an integer"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"seed": 2**32 - 1, "num_seeds": 2}, "seed \\+ num_seeds"),
        ({"reduction": "quick"}, "reduction must be one of 'fast', 'exact'"),
        ({"loggers": ["cvs"]}, "Did you mean 'csv'"),
        ({"target_return": math.inf}, "target_return must be finite"),
        ({"env": ""}, "env must be a string"),
        ({"keep_best": 1}, "keep_best = 1 goes by eval_episode_return: give eval_interval"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(values, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Config.from_dict(values)


def test_none_is_written_and_read():
    config = Config(hyperparameters={"max_grad_norm": None}, out=None)
    assert 'max_grad_norm = "none"' in config.to_toml()
    assert Config.from_toml(config.to_toml()).hyperparameters == {"max_grad_norm": None}


def test_numpy_values_become_plain():
    config = Config(seed=np.int64(3), hyperparameters={"discount": np.float64(0.5)})
    assert type(config.seed) is int
    assert Config.from_toml(config.to_toml()) == config


def test_whole_floats_count_as_integers():
    assert Config(num_train_steps=1e6).num_train_steps == 1_000_000


def test_a_file_that_is_wrong_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config at"):
        Config.read(tmp_path)
    file = tmp_path / "config.toml"
    file.write_text("seed = = 1")
    with pytest.raises(ValueError, match=r"config.toml: this is not TOML"):
        Config.read(tmp_path)
    Config(seed=4).write(file)
    assert Config.read(file) == Config.read(tmp_path) == Config(seed=4)


def test_changes_go_where_they_belong():
    config = Config().set({"num_envs": 8, "env_options.size": 3, "seed": 1})
    assert config.hyperparameters == {"num_envs": 8}
    assert (config.env_options, config.seed) == ({"size": 3}, 1)
    with pytest.raises(ValueError, match="Did you mean 'num_mini_batch'"):
        Config().set({"num_minibatch": 4})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1_000", 1000),
        ("1e6", 1e6),
        ("false", False),
        ("'a b'", "a b"),
        ("None", None),
        ("CartPole-v1", "CartPole-v1"),
        ("1\nseed = 2", "1\nseed = 2"),
        ("", ""),
    ],
)
def test_values_on_the_command_line_are_toml_or_text(text, value):
    assert parse_value(text) == value


def test_changes_leave_the_mapping_that_was_given_as_it_was():
    given = {"num_envs": 8}
    config = Config().set({"hyperparameters": given, "num_steps": 4})
    assert config.hyperparameters == {"num_envs": 8, "num_steps": 4}
    assert given == {"num_envs": 8}


def test_none_is_none_as_a_value_and_a_name_as_a_name():
    config = Config(env_options={"none": "none", "x": [None, {"none": 1}]})
    assert config.env_options == {"none": None, "x": [None, {"none": 1}]}
    assert Config.from_toml(config.to_toml()) == config


def test_hyperparameters_reach_the_agent_as_given():
    config = Config(hyperparameters={"num_envs": 4, "num_steps": 8, "learning_rate": 1e-3})
    agent = config.complete().make_agent()
    assert agent.num_envs == 4
    assert agent.learning_rate == np.float32(1e-3)
    assert agent.hidden_sizes == config.make_agent().hidden_sizes


def test_a_config_has_the_defaults_of_its_agent_and_no_others():
    config = Config()
    assert (config.agent, config.env) == ("ppo", "CartPole-v1")  # what `jaxroll train` runs
    for name, cls in AGENTS.items():
        defaults = {key: h.default for key, h in cls.hyperparameters().items()}
        assert Config(agent=name).complete().hyperparameters == defaults
    assert config.make_agent() == AGENTS["ppo"].create("CartPole-v1")


@pytest.mark.parametrize("old", RENAMED)
def test_a_name_of_another_library_is_answered_with_ours(old):
    message = re.escape(f"It is called {RENAMED[old]} here.")
    for refused in (
        lambda: Config.from_dict({"hyperparameters": {old: 1}}),
        lambda: Config.from_dict({old: 1}),
        lambda: Config().set({old: 1}),
        lambda: AGENTS["ppo"].create("CartPole-v1", **{old: 1}),
        lambda: Options.make(**{old: 1}),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            refused()


def test_configs_of_omegaconf_are_mappings_with_lists_like_any_other():
    omegaconf = pytest.importorskip("omegaconf")
    values = {
        "num_train_steps": 1e4,
        "loggers": ["csv", "tensorboard"],
        "out": "${oc.env:HOME}/run",
        "env_options": {"max_steps_in_episode": 9},
        "hyperparameters": {"hidden_sizes": [32, 16], "num_envs": 4, "max_grad_norm": None},
    }
    config = Config.from_dict(omegaconf.OmegaConf.create(values))
    assert config.loggers == ("csv", "tensorboard")
    assert config.hyperparameters == values["hyperparameters"]
    assert type(config.hyperparameters["hidden_sizes"]) is list
    assert "$" not in config.out
    assert Config.from_toml(config.to_toml()) == config
    # As in a Hydra app: the run below a key of its own, and a group's options given to `create`.
    nested = omegaconf.OmegaConf.create({"run": values, "ppo": values["hyperparameters"]})
    assert Config.from_dict(nested.run) == config
    assert DistributedTrainer(nested.run).agent.hidden_sizes == (32, 16)
    assert AGENTS["ppo"].create("CartPole-v1", **nested.ppo).hidden_sizes == (32, 16)
    assert Options.make(loggers=nested.run.loggers).loggers == ("csv", "tensorboard")
