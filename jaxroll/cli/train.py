"""`jaxroll train` and `jaxroll resume`."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxroll._version import __version__
from jaxroll.checks import near_matches
from jaxroll.cli.parser import UsageError
from jaxroll.cli.startup import start
from jaxroll.config import Config, merge, parse_value
from jaxroll.train.text import format_mean
from jaxroll.trainer import DistributedTrainer

_FLAGS = ("num_train_steps", "seed", "num_seeds", "devices", "reduction", "num_envs", "num_actors")


def train_command(args: argparse.Namespace) -> int:
    """Train, test, and say where everything is."""
    config = config_of(args)
    if args.out is not None:
        config = config.replace(out=args.out)
    trainer = _prepare(args, config)
    default = f"runs/{config.agent}-{_file_name(config.env)}-{config.seed}"
    out = _agree_on(claim_directory, config.out or default)
    trainer.config = trainer.config.replace(out=out)
    return _run(trainer, args)


def resume_command(args: argparse.Namespace) -> int:
    """Go on with a run where its newest checkpoint is."""
    changes = _set_options(args.set)
    for name in ("num_train_steps", "devices", "reduction"):
        if getattr(args, name) is not None:
            changes[name] = parse_value(getattr(args, name))
    config = Config.read(args.run).set(changes).replace(out=args.run)
    return _run(_prepare(args, config), args, resume=True)


def config_of(args: argparse.Namespace) -> Config:
    """The config that a command line describes: the file, then --set, then the other options."""
    values: dict[str, Any] = {}
    if args.config is not None:
        values = Config.read(args.config).to_dict()
        if _is_of_a_run(Path(args.config)):
            values["out"] = None  # that directory is the other run's
    changes: dict[str, Any] = {}
    for name in ("agent", "env"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    _check_agent(changes)
    changes |= _set_options(args.set)
    for name in _FLAGS:
        if getattr(args, name) is not None:
            changes[name] = parse_value(getattr(args, name))
    return Config.from_dict(merge(values, changes))


def claim_directory(wanted: str) -> str:
    """Make a directory of this name, or of the next free one: no run is ever written over."""
    base, number = Path(wanted), 1
    while True:
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not any(path.iterdir()):
                # Of two that find it empty at once, one makes the file.
                os.close(os.open(path / ".lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                return str(path)
        except FileExistsError:
            pass  # taken meanwhile, or a file
        except OSError as error:
            raise UsageError(
                f"cannot make the run directory {path}: {error}. Choose another with --out."
            ) from error
        number += 1


def _set_options(items: list[str]) -> dict[str, Any]:
    """What --set says, by name."""
    changes = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set takes KEY=VALUE, such as learning_rate=1e-3, got {item!r}.")
        changes[key.strip()] = parse_value(text)
    return changes


def _is_of_a_run(path: Path) -> bool:
    """Whether a config is that of a run, to be repeated, and not one written by hand."""
    directory = path if path.is_dir() else path.parent
    names = (".lock", "metrics.jsonl", "checkpoints")
    return any((directory / name).exists() for name in names)


def _check_agent(changes: dict[str, Any]) -> None:
    from jaxroll.agents import AGENTS
    from jaxroll.envs import list_envs

    name = changes.get("agent")
    if name is None or name in AGENTS:
        return
    if "env" not in changes and name in list_envs("gymnax"):
        raise UsageError(f"{name!r} is an environment. Use: jaxroll train ppo {name}")
    raise UsageError(f"unknown agent {name!r}. {near_matches(name, AGENTS)}")


def _prepare(args: argparse.Namespace, config: Config) -> DistributedTrainer:
    start(
        devices=config.devices,
        cache=not args.no_cache,
        distributed=args.distributed,
        coordinator=args.coordinator,
        num_processes=args.num_processes,
        process_id=args.process_id,
        heartbeat_timeout=args.heartbeat_timeout,
    )
    trainer = DistributedTrainer(config)
    trainer.check()  # before a directory is made
    return trainer


def _run(trainer: DistributedTrainer, args: argparse.Namespace, resume: bool = False) -> int:
    config = trainer.config
    shown = not args.quiet and jax.process_index() == 0
    if shown:
        print(_headline(trainer, resume))
        if warning := _early_zero(config):
            print(f"jaxroll: {warning}", file=sys.stderr)
    progress = "silent" if args.quiet else None
    _, history = trainer.train(resume=resume, progress=progress, on_signal="return")
    out = trainer.out
    assert out is not None
    is_saved = history.saved_step == history.stopped_at
    if not is_saved and jax.process_index() == 0:
        print(f"jaxroll: {_unsaved(history, out)}", file=sys.stderr)
    if history.stopped_by in ("SIGINT", "SIGHUP", "SIGTERM"):
        if shown and is_saved:
            step = f"{history.stopped_at:,}"
            print(
                f"stopped by {history.stopped_by}, saved at step {step}. Go on with: "
                f"jaxroll resume {out}"
            )
        return 128 + signal.Signals[history.stopped_by] if is_saved else 1
    # Before the test: a signal during it then finds the curve drawn.
    curve = _draw(out, history) if jax.process_index() == 0 else None
    result = trainer.test()
    if shown:
        lines = _summary(config, result, history, out, curve)
        print("\n".join(f"  {name:<8} {text}" for name, text in lines))
    return 0 if is_saved else 1


def _early_zero(config: Config) -> str:
    """What to say where the learning rate is 0 before the run's end, as when one is prolonged."""
    decay, end = config.hyperparameters.get("decay_steps"), config.num_train_steps
    if decay is None or decay >= end:
        return ""
    return (
        f"the learning rate is 0 from step {decay:,.0f} on, and the run ends at {end:,}. Use --set "
        f"decay_steps={end}."
    )


def _unsaved(history: Any, out: Path) -> str:
    """What is left of a run whose last state could not be saved."""
    there = "nothing is"
    if history.saved_step is not None:
        there = f"step {history.saved_step:,} is"
    return f"step {history.stopped_at:,} could not be saved in {out}; {there} on disk there."


def _headline(trainer: DistributedTrainer, resume: bool) -> str:
    config, h = trainer.config, trainer.config.hyperparameters
    where = f"{jax.device_count() if config.devices is None else config.devices} × "
    if config.devices is None and jax.process_count() == 1:
        where = ""
    several = f", {config.num_seeds} seeds" if config.num_seeds > 1 else ""
    actors = f", {h['num_actors']} actors" if h["num_actors"] > 1 else ""
    return (
        f"jaxroll {__version__}: {config.agent} on {config.env}, {h['num_envs']} environments × "
        f"{h['num_steps']} steps{actors}, seed {config.seed}{several}, {where}"
        f"{jax.default_backend()}{', going on in' if resume else ' →'} {config.out}"
    )


def _summary(
    config: Config, result: dict[str, Any], history: Any, out: Path, curve: Path | None
) -> list[tuple[str, str]]:
    score = format_mean(result["episode_return"], result["episode_return_std"])
    what = f"{result['num_episodes']} deterministic episodes"
    lines = []
    if history.stopped_by != "steps":
        lines.append(("stopped", f"by {history.stopped_by}"))
    if "seed_returns" in result:
        what += " of each seed"
    lines.append(("return", f"{score} over {what}"))
    if "seed_returns" in result:
        means = np.asarray(result["seed_returns"])
        shown = ", ".join(f"{x:.4g}" for x in means[:16]) + (" …" if len(means) > 16 else "")
        lines.append(("by seed", f"{format_mean(means.mean(), means.std())}: {shown}"))
    lines.append(("run", str(out)))
    if curve is not None:
        lines.append(("curve", str(curve)))
    return lines


def _draw(out: Path, history: Any) -> Path | None:
    if "episode_return" not in history:  # no episode has ended
        return None
    from jaxroll.train.plot import plot_runs

    plot_runs(out, "episode_return", out=out / "curve.png")
    return out / "curve.png"


def _agree_on(function: Any, argument: str) -> str:
    """The result of process 0, on every process."""
    if jax.process_count() == 1:
        return function(argument)
    from jax.experimental import multihost_utils

    data = np.zeros(4096, np.uint8)
    if jax.process_index() == 0:
        text = function(argument).encode()
        data[: len(text)] = np.frombuffer(text, np.uint8)
    data = np.asarray(multihost_utils.broadcast_one_to_all(data))
    return bytes(data).rstrip(b"\0").decode()


def _file_name(env: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", env).strip("-.") or "env"
