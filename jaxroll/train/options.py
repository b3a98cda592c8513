"""The options of a run: one schema for Python, config files and the command line.

Nothing heavy is imported, so that the command line can show its help.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxroll.checks import (
    check_choice,
    check_count,
    check_number,
    check_path,
    check_seed,
    did_you_mean,
    unknown_name,
)

LOGGERS = ("jsonl", "csv", "tensorboard")


def option(default: Any, help: str, check: Callable[[str, Any], Any], metavar: str = "N") -> Any:
    """A field of `Options`.

    Args:
      default: its value; None: it may be None.
      help: one sentence.
      check: a function of name and value: the value as it is stored, or an error.
      metavar: what stands for the value in help.
    """
    metadata = {"help": help, "check": check, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


def choice(default: str, help: str, *others: str) -> Any:
    """A field of `Options` that is one of a few words, the default among them."""
    words = (default, *others)
    return option(default, help, functools.partial(check_choice, choices=words), "|".join(words))


steps = functools.partial(check_count, below=2**63)  # of environments


def number(name: str, value: Any, rule: str | None = None) -> float:
    """A finite number."""
    return float(check_number(name, value, rule))


def text(name: str, value: Any) -> str:
    """One or more characters that a file can hold."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}.")
    if not value or not is_writable(value):
        raise ValueError(f"{name} must be a string of one or more characters, got {value!r}.")
    return value


def is_writable(value: str) -> bool:
    """Whether text can be encoded: no half of a surrogate pair is in it."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def path(name: str, value: Any) -> str:
    """A path on this machine, as text."""
    return text(name, str(check_path(name, value)))


def loggers(name: str, value: Any) -> tuple[Any, ...]:
    """Names of loggers, and functions of a row; one alone, or names joined by commas, too."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif callable(value):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise TypeError(f'{name} must be a list of names or functions, got {value!r}. Use ["csv"].')
    for item in value:
        if not callable(item) and item not in LOGGERS:
            raise ValueError(
                f"unknown logger {item!r}: {name} must be of {', '.join(LOGGERS)}, or functions of "
                f"a row.{did_you_mean(item, LOGGERS)}"
            )
    return tuple(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Values that `train` takes, checked when they are made; a `Config` has them too.

    Without a `log_interval` rows also go by the clock, which costs little on any device: in a run
    of more than 50 s they fall on other steps each time, as does a stop by `target_return` that
    goes by rows. What is learned does not depend on them.

    Attributes: see `fields_of(Options)`, or `jaxroll train --help`.
    """

    num_train_steps: int = option(300_000, "environment steps of the whole run", steps)
    seed: int = option(0, "everything random follows from it", check_seed)
    reduction: str = choice("fast", "exact: bitwise the same on any number of devices", "exact")
    log_interval: int | None = option(
        None,
        "environment steps between rows; none: one each second, and each 2 % of the run",
        steps,
    )
    eval_interval: int | None = option(
        None, "environment steps between evaluations, each with a row; none: no evaluation", steps
    )
    num_eval_episodes: int = option(32, "episodes of each evaluation", check_count)
    checkpoint_interval: int | None = option(
        None, "environment steps between checkpoints; none: one every five minutes", steps
    )
    keep_checkpoints: int = option(3, "how many of the latest checkpoints stay", check_count)
    keep_best: int = option(
        0,
        "how many of the best by eval_episode_return stay beside them; each evaluation is saved",
        functools.partial(check_count, at_least=0),
    )
    target_return: float | None = option(
        None, "stop when an evaluation (without evaluations: a row) reaches this return", number
    )
    time_budget: float | None = option(
        None, "stop after so many seconds", functools.partial(number, rule="> 0"), "SECONDS"
    )
    nonfinite: str = choice("stop", "what to do at a gradient that is not finite", "skip")
    init_model_path: str | None = option(
        None, "a checkpoint or run whose policy the run starts from", path, "PATH"
    )
    loggers: tuple[Any, ...] = option(
        (), "beside metrics.jsonl, which is always written: csv, tensorboard", loggers, "NAMES"
    )
    progress: str = choice("auto", "how progress is shown", "bar", "lines", "silent")

    def __post_init__(self):
        for name, field in fields_of(type(self)).items():
            value = getattr(self, name)
            if value is not None or field.default is not None:
                object.__setattr__(self, name, field.metadata["check"](name, value))
        if self.keep_best and self.eval_interval is None:
            raise ValueError(
                f"keep_best = {self.keep_best} goes by eval_episode_return: give eval_interval, "
                "the environment steps between evaluations."
            )

    @classmethod
    def make(cls, **given: Any) -> Options:
        """The options; for an unknown name, an error that says what was meant."""
        known = [*fields_of(cls)]
        for name in given:
            if name not in known:
                raise TypeError(unknown_name("option", name, known, "train"))
        return cls(**given)


def fields_of(cls: type[Options]) -> dict[str, dataclasses.Field[Any]]:
    """The fields that are options, by name: for checks and for help."""
    return {f.name: f for f in dataclasses.fields(cls) if "check" in f.metadata}
