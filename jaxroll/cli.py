"""The command line: `jaxroll train | eval | resume | plot | envs | agents`.

Its flags are the settings of `Config`. Nothing heavy is imported before a command runs, so that
help is quick. A mistake of the user's is one message and exit code 2; see `EXIT_CODES`.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxroll._version import __version__
from jaxroll.checks import did_you_mean, near_matches
from jaxroll.config import Config, parse_value
from jaxroll.train import signals
from jaxroll.train.options import fields_of
from jaxroll.train.text import PLAIN

EXIT_CODES = {
    "done": 0,
    "the run failed": 1,
    "a mistake in the command or config": 2,
    "a peer process is gone": 75,
    "stopped by SIGHUP, saved": 129,
    "stopped by Ctrl-C, saved": 130,
    "stopped by SIGTERM, saved": 143,
}

_EXAMPLES = """\
examples:
  jaxroll train                                 PPO on CartPole-v1
  jaxroll train impala Breakout-MinAtar --num-train-steps 5e6
  jaxroll train ppo Pendulum-v1 --num-seeds 8 --set learning_rate=1e-3
  jaxroll eval runs/ppo-CartPole-v1-0
  jaxroll plot runs/*

exit codes:
"""

_TRAIN_EXAMPLES = """\
examples:
  jaxroll train
  jaxroll train ppo CartPole-v1 --seed 3 --set learning_rate=1e-3 --set hidden_sizes="[32, 32]"
  jaxroll train ppo MemoryChain-bsuite --set network=lstm --set env_options.memory_length=10
  jaxroll train ppo CartPole-v1 --num-seeds 8
  jaxroll train impala Breakout-MinAtar --num-actors 8 --devices 8 --checkpoint-interval 1e6
  jaxroll train --config runs/ppo-CartPole-v1-0/config.toml --seed 1
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit code.

    Args:
      argv: the words after `jaxroll`; None: those of this process.

    Example:
      >>> main(["agents"])  # doctest: +ELLIPSIS
      ppo ...
      0
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: or the next file opened would be the stream
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper) and mode == "w":
            stream.reconfigure(errors=PLAIN)  # ASCII and latin-1 have neither … nor ±
    # XLA's remarks about cached programs would land in the middle of the bar.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    argv = list(sys.argv[1:] if argv is None else argv)
    with signals.own_process():
        try:
            args = parse(argv)
            if isinstance(args, int):
                return args
            commands = importlib.import_module(f"jaxroll.{args.module}")
            return getattr(commands, f"{args.command}_command")(args)
        except KeyboardInterrupt:
            return _fail(130, "interrupted")
        except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except Exception as error:
            return _explain(error, "--traceback" in argv)


def _explain(error: Exception, debug: bool) -> int:
    """One message for what a user can put right, a traceback for what looks like our fault."""
    debug = debug or os.environ.get("JAXROLL_DEBUG", "0") not in ("", "0")
    mistakes = (ValueError, TypeError, ImportError, LookupError, FileExistsError, FileNotFoundError)
    if debug:
        traceback.print_exception(error)
    if isinstance(error, mistakes) and _is_ours(error):
        return _fail(2, str(error.args[0] if isinstance(error, KeyError) else error))
    if isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED"):
        reason = str(error).partition("\n")[0] or "MemoryError"
        return _fail(1, f"there is too little memory ({reason}). Use fewer num_envs or num_steps.")
    is_known = isinstance(error, OSError | ArithmeticError)
    if is_known or type(error).__module__.startswith("jaxroll."):
        return _fail(1, str(error))
    if not debug:
        traceback.print_exception(error)
    return _fail(1, "this was not expected; see the traceback above")


def _fail(code: int, message: str) -> int:
    say(message)
    return code


def say(message: str) -> None:
    """Print a remark or an error."""
    print(f"jaxroll: {message}", file=sys.stderr)


def _is_ours(error: BaseException) -> bool:
    """Whether a check of jaxroll's raised it, rather than a library in its depths."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).resolve().is_relative_to(Path(__file__).resolve().parent)


# What can be typed.


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. See `{self.prog} --help`.")


def parse(argv: Sequence[str]) -> argparse.Namespace | int:
    """The arguments; or the exit code, where help or the version was asked for."""
    parser, commands = make_parser()
    if not argv:
        parser.print_help()
        return EXIT_CODES["a mistake in the command or config"]
    if not argv[0].startswith("-") and argv[0] not in commands:
        raise ValueError(f"unknown command {argv[0]!r}. {near_matches(argv[0], commands)}")
    try:
        args, unknown = parser.parse_known_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    if unknown:
        actions = commands[args.command]._actions
        known = [name for action in actions for name in action.option_strings]
        word = unknown[0].partition("=")[0]
        hint = near_matches(word, known) if word.startswith("-") else ""
        raise ValueError(f"{args.command} does not take {word!r}. {hint}".strip())
    return args


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    """The parser, and that of each command."""
    parser = _Parser(
        prog="jaxroll",
        description="Train, evaluate and plot reinforcement learning agents in JAX.",
        epilog=_EXAMPLES + "\n".join(f"  {code:<3} {text}" for text, code in EXIT_CODES.items()),
    )
    parser.add_argument("--version", action="version", version=f"jaxroll {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, help: str, epilog: str | None = None) -> argparse.ArgumentParser:
        description = f"{help.capitalize()}."
        sub = subparsers.add_parser(name, help=help, description=description, epilog=epilog)
        sub.set_defaults(command=name, module="commands")
        _flag(sub, "--traceback", "show where an error came from")
        return sub

    train = command("train", "train an agent", _TRAIN_EXAMPLES)
    for name in ("agent", "env"):
        text = f"(default: {fields_of(Config)[name].default})"
        options: Any = {"nargs": "?", "default": argparse.SUPPRESS, "help": text}
        train.add_argument(name, metavar=name.upper(), **options)
    _flag(train, "--config FILE", "a TOML file, or a run to repeat")
    text = "the run's directory; a free name is made of it if it is taken"
    _flag(train, "--out DIR", f"{text} (default: runs/AGENT-ENV-SEED)", default=argparse.SUPPRESS)
    _add_run_flags(train, is_new=True)

    play = command("eval", "play whole episodes with a trained policy")
    play.add_argument("run", metavar="RUN", help="the directory of a run")
    _flag(play, "--num-episodes N", "(default: the config's)", type=int)
    _flag(play, "--seed N", "of the episodes", type=int, default=0)
    _flag(play, "--stochastic", "sample actions")
    _flag(play, "--best", "take the best checkpoint (see keep_best), not the last")
    _flag(play, "--no-cache", "keep no compiled programs on disk")

    resume = command("resume", "go on with a run")
    resume.description = "Go on with a run. Settings that are not given stay as they were."
    resume.add_argument("run", metavar="RUN", help="the directory of a run")
    _add_run_flags(resume, is_new=False)

    plot = command("plot", "draw learning curves")
    plot.set_defaults(module="cli")
    text = "directories of runs, and columns to draw (default: episode_return)"
    plot.add_argument("runs", nargs="+", metavar="RUN|COLUMN", help=text)
    _flag(plot, "--out FILE", "a .png, .svg or .pdf (default: curve.png)")
    _flag(plot, "--x COLUMN", "the column along the bottom", default="step")
    bands = ("range", "std", "ci", "none")
    plot.add_argument("--band", choices=bands, default="range", help="over seeds")
    _flag(plot, "--smooth ROWS", "average over rows", type=int, default=1)
    _flag(plot, "--title TITLE", "above the charts")

    envs = command("envs", "list environments")
    envs.add_argument("source", nargs="?", help="one source, such as gymnasium; default: all")
    agents = command("agents", "list agents and their hyperparameters")
    agents.add_argument("name", nargs="?", help="show the hyperparameters of this agent")
    return parser, subparsers.choices


def _flag(parser: Any, usage: str, help: str, **options: Any) -> None:
    """Add "--name METAVAR", or "--name" which is given or not."""
    name, _, metavar = usage.partition(" ")
    options |= {"metavar": metavar} if metavar else {"action": "store_true"}
    parser.add_argument(name, help=help.replace("%", "%%"), **options)


def _add_run_flags(parser: argparse.ArgumentParser, is_new: bool) -> None:
    """What `train` and `resume` take: the settings of a config, and where to run."""
    _flag(parser, "--quiet", "print nothing but errors")
    text = "any hyperparameter (see `jaxroll agents ppo`), setting or env_options.NAME; repeatable"
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help=text)
    given = {"type": parse_value, "default": argparse.SUPPRESS}
    experiment = ("num_train_steps", "seed", "num_seeds") if is_new else ("num_train_steps",)
    place = ("devices", "reduction")
    no_flags = ("agent", "env", "out", "seed", "num_seeds", *experiment, *place)
    others = [name for name in fields_of(Config) if name not in no_flags]

    def add_settings(title: str, names: Iterable[str]) -> Any:
        group = parser.add_argument_group(title)
        for name in names:
            field = fields_of(Config)[name]
            default = f" (default: {field.default})" * (is_new and field.default not in (None, ()))
            usage = f"--{name.replace('_', '-')} {field.metadata['metavar']}"
            _flag(group, usage, field.metadata["help"] + default, **given)
        return group

    group = add_settings("the experiment", experiment)
    if is_new:
        _flag(group, "--num-envs N", "environments in total", **given)
        _flag(group, "--num-actors N", "logical actors; devices must divide them", **given)
    add_settings("rows, evaluations, checkpoints and stops", others)
    group = add_settings("where it runs", place)
    _flag(group, "--no-cache", "keep no compiled programs on disk")
    text = "one of several processes, found by JAX: Slurm (srun), MPI (mpirun), TPU pods"
    _flag(group, "--distributed", text)
    _flag(group, "--coordinator HOST:PORT", "address of process 0")
    _flag(group, "--num-processes N", "processes of the run", type=int)
    _flag(group, "--process-id I", "which of them this is, from 0", type=int)
    text = "a process that is silent for so long counts as gone (default: 100 with --distributed"
    _flag(group, "--heartbeat-timeout SECONDS", f"{text}, else 10)", type=int)


def plot_command(args: argparse.Namespace) -> int:
    """Draw columns of runs into a file."""
    runs = [word for word in args.runs if os.path.exists(word)]
    names = [word for word in args.runs if word not in runs]
    for name in names:
        if os.sep in name or not runs:
            hint = did_you_mean(name, map(str, Path(name).parent.glob("*")))
            raise ValueError(f"there is no run at {name}.{hint}")
    drawn = [run for run in runs if not _is_empty(Path(run))]
    for run in runs:
        if run not in drawn and drawn:
            say(f"{run} has no metrics and is left out.")
    if not drawn:
        raise ValueError(f"{', '.join(runs)} has no metrics to draw yet.")
    from jaxroll.train.plot import plot_runs

    is_one = len(drawn) == 1 and Path(drawn[0]).is_dir()
    out = Path(args.out or (Path(drawn[0]) if is_one else Path()) / "curve.png")
    band = None if args.band == "none" else args.band
    plot_runs(
        drawn, names or None, x=args.x, band=band, smooth=args.smooth, title=args.title, out=out
    )
    print(out)
    return 0


def _is_empty(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return run.is_dir() and not (metrics.is_file() and metrics.stat().st_size)
