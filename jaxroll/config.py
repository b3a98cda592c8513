"""Config: a whole run as one value that reads and writes TOML and dicts.

The same config gives the same run. Its settings are the options of `train` and a few more;
hyperparameters are those of the agent's class and are checked there, where they are defined. TOML
has no null: the string "none" stands for None.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from jaxroll.checks import check_choice, check_count, did_you_mean
from jaxroll.train.options import Options, is_writable, option, path, text

GIVEN = "given:"  # before the name of an environment that no config can make, only be given
_TABLES = ("env_options", "hyperparameters")
_WORDS = {
    **dict.fromkeys(("none", "None"), None),
    **dict.fromkeys(("true", "True", "yes", "on"), True),
    **dict.fromkeys(("false", "False", "no", "off"), False),
}


def agent_class(name: Any) -> Any:
    """The class of an agent by its name, such as "ppo"."""
    from jaxroll.agents import AGENTS

    return AGENTS[check_choice("agent", name, list(AGENTS))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Everything that makes a run: what `DistributedTrainer` and the command line take.

    Example:
      >>> config = Config(agent="ppo", hyperparameters={"num_envs": 8})
      >>> Config.from_toml(config.to_toml()) == config
      True
      >>> Config.from_dict({"agent": "ppo", "sed": 1})
      Traceback (most recent call last):
        ...
      ValueError: unknown setting 'sed'. Did you mean 'seed'?
    """

    agent: str = option("ppo", "the algorithm", lambda _, name: agent_class(name) and name, "AGENT")
    env: str = option(
        "CartPole-v1", "the environment, with its source's prefix if not gymnax", text, "ENV"
    )
    num_seeds: int = option(
        1, "seeds from `seed` on, trained side by side in one program", check_count
    )
    devices: int | None = option(None, "devices the actors are spread over; none: one", check_count)
    num_test_episodes: int = option(100, "episodes of the test after training", check_count)
    out: str | None = option(None, "the run's directory; none: nothing is written", path, "DIR")
    env_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    hyperparameters: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        from jaxroll.agents.hyperparameters import resolve

        for field in dataclasses.fields(self):
            value = _plain(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            if field.name in _TABLES:
                _check_table(field.name, value)
        super().__post_init__()
        if self.seed + self.num_seeds > 2**32:
            raise ValueError(
                f"seed + num_seeds must be at most 2**32, got {self.seed} + {self.num_seeds}."
            )
        resolve(agent_class(self.agent), self.hyperparameters)  # for its checks

    # Dicts and TOML.

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """A config from a mapping, such as an OmegaConf one; an unknown key is an error."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name in known:
                continue
            agent = values.get("agent", "ppo")
            hint = did_you_mean(name, known)
            if name in agent_class(agent).hyperparameters():
                hint = f" It is a hyperparameter of {agent}: write it below [hyperparameters]."
            raise ValueError(f"unknown setting {name!r}.{hint}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that TOML and JSON can hold, None aside; changing them changes no config."""
        names = [field.name for field in dataclasses.fields(self)]
        names = dict.fromkeys(["agent", "env", *names])  # these two first
        return {name: _plain(name, getattr(self, name)) for name in names}

    @classmethod
    def from_toml(cls, text: str) -> Config:
        """A config from TOML."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"this is not TOML: {error}.") from error
        return cls.from_dict(values)

    def to_toml(self) -> str:
        """The config as TOML, all of its settings."""
        values = {k: v for k, v in self.to_dict().items() if k not in _TABLES or v}
        return tomli_w.dumps(_plain("config", values, none="none"))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Config:
        """The config in a TOML file, or in the `config.toml` of a run's directory."""
        path = Path(path)
        file = path / "config.toml" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(
                f"no config at {file}. Give a TOML file, or a run's directory with a config.toml."
            )
        try:
            return cls.from_toml(file.read_text(encoding="utf-8"))
        except (ValueError, TypeError) as error:  # UnicodeDecodeError is a ValueError
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{file}: {error}") from error

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the config as TOML, whole or not at all."""
        from jaxroll.train.files import replace_file

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), self.to_toml().encode())

    # Changes.

    def replace(self, **changes: Any) -> Config:
        """A copy with these settings changed."""
        return dataclasses.replace(self, **changes)

    def set(self, values: Mapping[str, Any]) -> Config:
        """A copy with settings or hyperparameters changed, by name; `env_options.x` is an option.

        Example:
          >>> config = Config().set({"seed": 3, "learning_rate": 1e-3, "env_options.size": 5})
          >>> config.seed, config.hyperparameters, config.env_options
          (3, {'learning_rate': 0.001}, {'size': 5})
        """
        settings = self.to_dict()
        known = agent_class(values.get("agent", self.agent)).hyperparameters()
        for name, value in values.items():
            table, dot, key = name.partition(".")
            if name in _TABLES:
                settings[name] = dict(_check_table(name, value))
            elif name in settings:
                settings[name] = value
            elif dot and table in _TABLES:
                settings[table][key] = value
            elif name in known:
                settings["hyperparameters"][name] = value
            else:
                raise ValueError(
                    f"{name!r} is neither a setting nor a hyperparameter of {settings['agent']}."
                    f"{did_you_mean(name, [*settings, *known])}"
                )
        return Config.from_dict(settings)

    def complete(self) -> Config:
        """A copy that names every hyperparameter, so that new defaults do not change the run."""
        known = agent_class(self.agent).hyperparameters()
        defaults = {name: h.default for name, h in known.items()}
        return self.replace(hyperparameters=defaults | self.hyperparameters)

    # What it describes.

    def make_env(self) -> Any:
        """The environment."""
        from jaxroll.envs import make_env

        if self.env.startswith(GIVEN):
            name = self.env.removeprefix(GIVEN)
            raise ValueError(
                f"the config is of a run on an environment object, {name}, which no name makes. "
                "Give it again: DistributedTrainer(config, train_env=…)."
            )
        return make_env(self.env, **self.env_options)

    def make_agent(self, env: Any = None) -> Any:
        """The agent, for this environment or for the config's own."""
        env = self.make_env() if env is None else env
        return agent_class(self.agent).create(env, **self.hyperparameters)


def _check_table(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name} must be a table of names and values, got {value!r}. Set one of its entries: "
            f"{name}.NAME=VALUE."
        )
    return value


def parse_value(text: str) -> Any:
    """A value as on a command line: a word such as no, TOML if it is TOML, else the text itself.

    Example:
      >>> [parse_value(x) for x in ("3", "1e-3", "off", "[64, 64]", "lstm", "'no'", "none")]
      [3, 0.001, False, [64, 64], 'lstm', 'no', None]
    """
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if values.keys() == {"value"} else text


def _plain(name: str, value: Any, none: str | None = None) -> Any:
    """The value as TOML and JSON have it, with `none` for None and for "none"."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping):
        return {
            _plain(name, str(k), "none"): _plain(f"{name}.{k}", v, none) for k, v in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(name, v, none) for v in value]
    if value is None or value == "none":
        return none
    if isinstance(value, str) and not is_writable(value):
        raise ValueError(f"{name} must be text, got {value!r}.")
    if isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{name} must be a number, a string, a list or a table, got {value!r}, which a config "
        "file cannot hold."
    )
