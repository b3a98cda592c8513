"""Config: a whole run as one value that reads and writes TOML and dicts.

The same config gives the same run. Settings are fields here; hyperparameters are those of the
agent's class and are checked there, where they are defined. TOML has no null: the string "none"
stands for None.

Nothing heavy is imported before a config is made, so that the command line can show its help.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxroll._toml import toml_key, toml_value
from jaxroll.checks import check_path
from jaxroll.train.text import near_matches

MAX_SEED = 2**31 - 1
GIVEN = "given:"  # before the name of an environment that no config can make, only be given
_TABLES = ("env_options", "hyperparameters")
_WORDS = {
    **dict.fromkeys(("none", "None"), None),
    **dict.fromkeys(("true", "True", "yes", "on"), True),
    **dict.fromkeys(("false", "False", "no", "off"), False),
}
DECAYING = ("ppo",)  # agents that stay where they are good only if their step size falls


def setting(
    default: Any,
    help: str,
    *,
    kind: type | None = None,
    at_least: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of `Config`.

    Args:
      default: its value; None: it may be None.
      help: one sentence.
      kind: its type; None: that of the default.
      at_least: the smallest value allowed.
      choices: the only values allowed.
    """
    metadata = {
        "help": help,
        "kind": kind or type(default),
        "at_least": at_least,
        "choices": choices,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that makes a run: what `DistributedTrainer` and the command line take.

    Example:
      >>> config = Config(agent="ppo", hyperparameters={"num_envs": 8})
      >>> Config.from_toml(config.to_toml()) == config
      True
      >>> Config.from_dict({"agent": "ppo", "sed": 1})
      Traceback (most recent call last):
        ...
      ValueError: unknown setting 'sed'. Did you mean "seed"?
    """

    agent: str = setting("ppo", "the algorithm")
    env: str = setting("CartPole-v1", "the environment, with its source's prefix if not gymnax")
    num_train_steps: int = setting(300_000, "environment steps of the whole run", at_least=1)
    seed: int = setting(0, "everything random follows from it", at_least=0)
    num_seeds: int = setting(
        1, "seeds from `seed` on, trained side by side in one program", at_least=1
    )
    devices: int | None = setting(
        None, "devices the actors are spread over; none: one", kind=int, at_least=1
    )
    reduction: str = setting(
        "fast", "exact: bitwise the same on any number of devices", choices=("fast", "exact")
    )
    log_interval: int = setting(10_000, "environment steps between rows", at_least=1)
    eval_interval: int | None = setting(
        None, "environment steps between evaluations; none: no evaluation", kind=int, at_least=1
    )
    num_eval_episodes: int = setting(32, "episodes of each evaluation", at_least=1)
    num_test_episodes: int = setting(100, "episodes of the test after training", at_least=1)
    checkpoint_interval: int | None = setting(
        None,
        "environment steps between checkpoints; none: one every five minutes",
        kind=int,
        at_least=1,
    )
    keep_checkpoints: int = setting(3, "how many of the latest checkpoints stay", at_least=1)
    keep_best: int = setting(
        0, "how many of the best by eval_episode_return stay beside them", at_least=0
    )
    target_return: float | None = setting(
        None, "stop when an evaluation (without evaluations: a row) reaches it", kind=float
    )
    time_budget: float | None = setting(
        None, "seconds after which the run stops", kind=float, at_least=0
    )
    nonfinite: str = setting("stop", "at a gradient that is not finite", choices=("stop", "skip"))
    init_model_path: str | None = setting(
        None, "a checkpoint or run whose policy the run starts from", kind=str
    )
    loggers: tuple[str, ...] = setting(
        (), "beside metrics.jsonl, which is always written: csv, tensorboard"
    )
    progress: str = setting(
        "auto", "how progress is shown", choices=("auto", "bar", "lines", "silent")
    )
    out: str | None = setting(None, "the run's directory; none: nothing is written", kind=str)
    env_options: dict[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"help": "options of the environment"}
    )
    hyperparameters: dict[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"help": "those of the agent that differ from its defaults"}
    )

    def __post_init__(self):
        for name, field in settings().items():
            object.__setattr__(self, name, _check_setting(name, field, getattr(self, name)))
        for name in _TABLES:
            object.__setattr__(self, name, _check_table(name, getattr(self, name)))
        if self.seed + self.num_seeds - 1 > MAX_SEED:
            raise ValueError(
                f"seed + num_seeds - 1 must be at most {MAX_SEED}, got {self.seed} + "
                f"{self.num_seeds} - 1."
            )
        if self.keep_best and self.eval_interval is None:
            raise ValueError(
                f"keep_best = {self.keep_best} goes by eval_episode_return: set eval_interval, the "
                "environment steps between evaluations."
            )
        cls = agent_class(self.agent)
        known = cls.hyperparameters()
        for name, value in self.hyperparameters.items():
            if name not in known:
                raise ValueError(
                    f"{self.agent} has no hyperparameter {name!r}. {near_matches(name, known)}"
                )
            if not known[name].is_static and isinstance(value, list | dict):
                raise TypeError(
                    f"{name} must be a number, got {value!r}. To try several values, use "
                    f"jaxroll.sweeps.sweep(agent, n, hyperparameters={{{name!r}: [a, b]}})."
                )
            known[name].check(value)

    # Dicts and TOML.

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """A config from a mapping; a key that it does not know is an error."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"unknown setting {name!r}. {_where(name, values, known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that TOML and JSON can hold, None aside; changing them changes no config."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _plain(name, value) for name, value in values.items()}

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
        values = self.to_dict()
        tables = {name: values.pop(name) for name in _TABLES}
        lines = [f"{name} = {toml_value(value)}" for name, value in values.items()]
        for name, table in tables.items():
            if table:
                lines += ["", f"[{name}]"]
                lines += [f"{toml_key(key)} = {toml_value(value)}" for key, value in table.items()]
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Config:
        """The config in a TOML file, or in the `config.toml` of a run's directory."""
        path = Path(path)
        file = path / "config.toml" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(
                f"no config at {file}. Give a TOML file, or the directory of a run, which holds a "
                "config.toml."
            )
        try:
            return cls.from_toml(file.read_text(encoding="utf-8"))
        except (ValueError, TypeError) as error:  # UnicodeDecodeError is a ValueError
            raise type_of(error)(f"{file}: {error}") from error

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the config as TOML, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(self.to_toml(), encoding="utf-8")
        os.replace(temporary, path)

    # Changes.

    def replace(self, **changes: Any) -> Config:
        """A copy with these settings changed."""
        return dataclasses.replace(self, **changes)

    def set(self, values: Mapping[str, Any]) -> Config:
        """A copy with settings or hyperparameters changed, by name; `env_options.x` is an option.

        Example:
          >>> config = Config().set({"seed": 3, "learning_rate": 1e-3})
          >>> config.seed, config.hyperparameters
          (3, {'learning_rate': 0.001})
        """
        return Config.from_dict(merge(self.to_dict(), values))

    def complete(self) -> Config:
        """A copy that names every hyperparameter, so that new defaults do not change the run.

        A run knows its length: PPO's learning rate falls to 0 over it, unless `decay_steps` says
        something else ("none": constant). As a number in the config it stays what it is when the
        run is resumed.
        """
        known = agent_class(self.agent).hyperparameters()
        defaults = {name: h.default for name, h in known.items()}
        if self.agent in DECAYING:
            defaults["decay_steps"] = self.num_train_steps
        return self.replace(hyperparameters={**defaults, **self.hyperparameters})

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
        return agent_class(self.agent).create(env, **self.complete().hyperparameters)


def settings() -> dict[str, dataclasses.Field]:
    """The fields that are single values: for help and checks."""
    return {f.name: f for f in dataclasses.fields(Config) if f.name not in _TABLES}


def agent_class(name: str) -> Any:
    """The class of an agent by its name, such as "ppo"."""
    from jaxroll.agents import AGENTS

    if name not in list(AGENTS):
        raise ValueError(f"unknown agent {name!r}. {near_matches(str(name), AGENTS)}")
    return AGENTS[name]


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config's dict with changes by name: of a setting, a hyperparameter or an option.

    Example:
      >>> merge({"seed": 0}, {"learning_rate": 0.1, "env_options.size": 3})
      {'seed': 0, 'env_options': {'size': 3}, 'hyperparameters': {'learning_rate': 0.1}}
    """
    merged = {**values, **{name: dict(values.get(name, {})) for name in _TABLES}}
    known = {**settings(), **dict.fromkeys(_TABLES)}
    agent = changes.get("agent", values.get("agent", "ppo"))
    for name, value in changes.items():
        table, dot, key = name.partition(".")
        if dot and table in _TABLES:
            merged[table][key] = value
        elif name in _TABLES and not isinstance(value, Mapping):
            raise TypeError(
                f"{name} must be a table of names and values, got {value!r}. Set one of its "
                f"entries: {name}.NAME=VALUE."
            )
        elif name in known:
            merged[name] = value
        elif name in (hyperparameters := agent_class(agent).hyperparameters()):
            merged["hyperparameters"][name] = value
        else:
            names = [*known, *hyperparameters]
            raise ValueError(
                f"{name!r} is neither a setting nor a hyperparameter of {agent}. "
                f"{near_matches(name, names)}"
            )
    return {name: value for name, value in merged.items() if name not in _TABLES or value}


def parse_value(text: str) -> Any:
    """A value as on a command line: a word such as no, TOML if it is TOML, else the text.

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


def type_of(error: Exception) -> type[Exception]:
    """TypeError or ValueError: a kind whose constructor takes a message."""
    return TypeError if isinstance(error, TypeError) else ValueError


def _check_setting(name: str, field: dataclasses.Field, value: Any) -> Any:
    kind, low = field.metadata["kind"], field.metadata["at_least"]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if field.default is None and (value is None or value == "none"):
        return None
    if kind is tuple:
        return _check_names(name, value)
    if kind is str:
        return _check_text(name, field, value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    article = {int: "an integer", float: "a number"}[kind]
    rule = article if low is None else f"{article} of at least {low}"
    if field.default is None:
        rule += ', or "none"'
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise TypeError(f"{name} must be {rule}, got {value!r}.")
    if not math.isfinite(value) or (low is not None and value < low):
        raise ValueError(f"{name} must be {rule}, got {value!r}.")
    return kind(value)


def _check_text(name: str, field: dataclasses.Field, value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}.")
    if value and name in ("out", "init_model_path"):
        check_path(name, value)
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
    if not value or not _is_text(value):
        raise ValueError(f"{name} must be a string of one or more characters, got {value!r}.")
    return value


def _check_names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    known = ("jsonl", "csv", "tensorboard")
    if not isinstance(value, Sequence):
        raise TypeError(f'{name} must be a list of names, got {value!r}. Use ["csv"].')
    for item in value:
        if item not in known:
            raise ValueError(f"unknown logger {item!r}. {near_matches(str(item), known)}")
    return tuple(value)


def _check_table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a table of names and values, got {value!r}.")
    return {str(key): _plain(f"{name}.{key}", item, text=True) for key, item in value.items()}


def _plain(name: str, value: Any, text: bool = False) -> Any:
    """The value as TOML has it: lists for tuples and arrays; with `text`, None for "none"."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if text and value == "none":
        return None
    if isinstance(value, str) and not _is_text(value):
        raise ValueError(f"{name} must be text, got {value!r}.")
    if isinstance(value, Mapping):
        return {str(k): _plain(f"{name}.{k}", v, text) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(name, v, text) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{name} must be a number, a string, a list or a table, got {value!r}, which a config "
        "file cannot hold."
    )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True


def _where(name: str, values: Mapping[str, Any], known: list[str]) -> str:
    """Near matches of a setting, or the table where a hyperparameter belongs."""
    agent = values.get("agent", "ppo")
    from jaxroll.agents import AGENTS

    if isinstance(agent, str) and agent in AGENTS:
        hyperparameters = AGENTS[agent].hyperparameters()
        if name in hyperparameters:
            return f"It is a hyperparameter of {agent}: write it below [hyperparameters]."
    return near_matches(name, known)
