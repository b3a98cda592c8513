"""What can be typed: commands, options, help. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxroll._version import __version__
from jaxroll.checks import near_matches
from jaxroll.config import Config
from jaxroll.train.options import fields_of

EXIT_CODES = {
    "done": 0,
    "the run failed": 1,
    "a mistake in the command or config": 2,
    "a peer process is gone": 75,
    "stopped by SIGHUP, saved": 129,
    "stopped by Ctrl-C, saved": 130,
    "stopped by SIGTERM, saved": 143,
}

COMMANDS = {
    "train": "train an agent",
    "eval": "play whole episodes with a trained policy",
    "resume": "go on with a run",
    "plot": "draw learning curves",
    "envs": "list environments",
    "agents": "list agents and their hyperparameters",
}

_TOP_EXAMPLES = """\
examples:
  jaxroll train                                 PPO on CartPole-v1
  jaxroll train impala Breakout-MinAtar --num-train-steps 5e6
  jaxroll train ppo Pendulum-v1 --num-seeds 8 --set learning_rate=1e-3
  jaxroll eval runs/ppo-CartPole-v1-0
  jaxroll plot runs/*
"""

_TRAIN_EXAMPLES = """\
examples:
  jaxroll train
  jaxroll train ppo CartPole-v1 --seed 3 --set learning_rate=1e-3 --set hidden_sizes="[32, 32]"
  jaxroll train ppo MemoryChain-bsuite --set network=lstm --set env_options.memory_length=10
  jaxroll train ppo CartPole-v1 --num-seeds 8
  jaxroll train impala Breakout-MinAtar --num-actors 8 --devices 8 --set checkpoint_interval=1e6
  jaxroll train --config runs/ppo-CartPole-v1-0/config.toml --seed 1
"""


class UsageError(Exception):
    """A command line that makes no sense; the message says why."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")


def parse(argv: Sequence[str]) -> argparse.Namespace | int:
    """The arguments; or the exit code, where help or the version was asked for."""
    parser, commands = make_parser()
    if not argv:
        parser.print_help()
        return EXIT_CODES["a mistake in the command or config"]
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UsageError(f"unknown command {argv[0]!r}. {near_matches(argv[0], COMMANDS)}")
    try:
        args, unknown = parser.parse_known_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    if unknown:
        command = commands.get(argv[0], parser)
        known = [name for action in command._actions for name in action.option_strings]
        word = unknown[0].partition("=")[0]
        hint = near_matches(word, known) if word.startswith("-") else ""
        raise UsageError(f"{argv[0]} does not take {word!r}. {hint}".strip())
    return args


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and that of each command."""
    codes = "\n".join(f"  {code:<3} {meaning}" for meaning, code in EXIT_CODES.items())
    parser = _Parser(
        prog="jaxroll",
        description="Train, evaluate and plot reinforcement learning agents in JAX.",
        epilog=f"{_TOP_EXAMPLES}\nexit codes:\n{codes}",
    )
    parser.add_argument("--version", action="version", version=f"jaxroll {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands: dict[str, argparse.ArgumentParser] = {}

    def command(name: str, module: str, epilog: str | None = None) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(
            name, help=COMMANDS[name], description=f"{COMMANDS[name].capitalize()}.", epilog=epilog
        )
        sub.set_defaults(module=module, function=f"{name}_command")
        sub.add_argument("--traceback", action="store_true", help="show where an error came from")
        commands[name] = sub
        return sub

    _train(command("train", "train", _TRAIN_EXAMPLES))
    _eval(command("eval", "runs"))
    _resume(command("resume", "train"))
    _plot(command("plot", "runs"))
    envs = command("envs", "listings")
    envs.add_argument("source", nargs="?", help="one source, such as gymnasium; default: all")
    agents = command("agents", "listings")
    agents.add_argument("name", nargs="?", help="show the hyperparameters of this agent")
    return parser, commands


def _setting(parser: Any, name: str) -> None:
    """An option of the command line for a setting of the config: one definition serves both."""
    field = fields_of(Config)[name]
    default = "" if field.default is None else f" (default: {field.default})"
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        metavar=field.metadata["metavar"],
        help=f"{field.metadata['help']}{default}".replace("%", "%%"),
    )


def _train(parser: argparse.ArgumentParser) -> None:
    agent, env = (fields_of(Config)[name].default for name in ("agent", "env"))
    parser.add_argument("agent", nargs="?", metavar="AGENT", help=f"(default: {agent})")
    parser.add_argument("env", nargs="?", metavar="ENV", help=f"(default: {env})")
    run = parser.add_argument_group("the experiment")
    _setting(run, "num_train_steps")
    _setting(run, "seed")
    _setting(run, "num_seeds")
    run.add_argument("--num-envs", metavar="N", help="environments in total")
    run.add_argument("--num-actors", metavar="N", help="logical actors; devices must divide them")
    run.add_argument("--config", metavar="FILE", help="a TOML file, or a run to repeat")
    _set(run)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        metavar="DIR",
        help="the run's directory; a free name is made of it if it is taken "
        "(default: runs/AGENT-ENV-SEED)",
    )
    output.add_argument("--quiet", action="store_true", help="print nothing but errors")
    _devices(parser)
    flags = ("agent", "env", "num_train_steps", "seed", "num_seeds", "devices", "reduction", "out")
    lines = [
        f"  {name:<20} {field.metadata['help']} (default: {_shown(field.default)})"
        for name, field in fields_of(Config).items()
        if name not in flags
    ]
    parser.epilog = f"more settings, for --set and config files:\n{chr(10).join(lines)}\n\n" + str(
        parser.epilog
    )


def _set(parser: Any) -> None:
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any hyperparameter (see `jaxroll agents ppo`), setting (see `jaxroll train --help`) "
        "or env_options.NAME; may be repeated",
    )


def _shown(default: Any) -> str:
    return "none" if default in (None, ()) else str(default)


def _devices(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where it runs")
    _setting(where, "devices")
    _setting(where, "reduction")
    where.add_argument("--no-cache", action="store_true", help="keep no compiled programs on disk")
    where.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes, found by JAX: Slurm (srun), MPI (mpirun), TPU pods",
    )
    where.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    where.add_argument("--num-processes", metavar="N", type=int, help="processes of the run")
    where.add_argument("--process-id", metavar="I", type=int, help="which of them this is, from 0")
    where.add_argument(
        "--heartbeat-timeout",
        metavar="SECONDS",
        type=int,
        help="a process that is silent for so long counts as gone "
        "(default: 100 with --distributed, else 10)",
    )


def _eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run")
    parser.add_argument("--num-episodes", metavar="N", type=int, help="(default: the config's)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the episodes")
    parser.add_argument("--stochastic", action="store_true", help="sample actions")
    parser.add_argument(
        "--best", action="store_true", help="take the best checkpoint (see keep_best), not the last"
    )
    parser.add_argument("--no-cache", action="store_true", help="keep no compiled programs on disk")


def _resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run")
    parser.add_argument(
        "--num-train-steps", metavar="N", help="steps of the whole run (default: the config's)"
    )
    _set(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    _devices(parser)


def _plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN|COLUMN",
        help="directories of runs, and columns to draw (default: episode_return)",
    )
    parser.add_argument("--out", metavar="FILE", help="a .png, .svg or .pdf (default: curve.png)")
    parser.add_argument("--x", metavar="COLUMN", default="step", help="the column along the bottom")
    parser.add_argument(
        "--band", choices=("range", "std", "ci", "none"), default="range", help="over seeds"
    )
    parser.add_argument("--smooth", metavar="ROWS", type=int, default=1, help="average over rows")
    parser.add_argument("--title", help="above the charts")
