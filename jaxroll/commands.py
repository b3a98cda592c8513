"""What the commands do; `cli.py` has what can be typed."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxroll import parallel
from jaxroll._version import __version__
from jaxroll.agents import AGENTS
from jaxroll.checks import check_choice
from jaxroll.cli import say
from jaxroll.config import Config, parse_value
from jaxroll.envs import list_envs
from jaxroll.train.options import fields_of
from jaxroll.train.plot import plot_runs
from jaxroll.train.text import format_mean, format_some
from jaxroll.trainer import DistributedTrainer


def train_command(args: argparse.Namespace) -> int:
    """Train, test, and say where everything is."""
    name = getattr(args, "agent", "ppo")
    if name not in AGENTS and "env" not in args and name in list_envs("gymnax"):
        raise ValueError(f"{name!r} is an environment. Use: jaxroll train ppo {name}")
    config = Config()
    if args.config is not None:
        config, path = Config.read(args.config), Path(args.config)
        directory = path if path.is_dir() else path.parent
        if any((directory / x).exists() for x in (".lock", "metrics.jsonl", "checkpoints")):
            config = config.replace(out=None)  # that directory is another run's
    return _train(args, config.set(_changes(args)))


def resume_command(args: argparse.Namespace) -> int:
    """Go on with a run where its newest checkpoint is."""
    config = Config.read(args.run).set(_changes(args)).replace(out=args.run)
    return _train(args, config, resume=True)


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """What --set and then the other flags change in a config, by name."""
    changes = {}
    for item in args.set:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set takes KEY=VALUE, such as learning_rate=1e-3, got {item!r}.")
        changes[key.strip()] = parse_value(text)
    known = (*fields_of(Config), "num_envs", "num_actors")
    return changes | {name: value for name, value in vars(args).items() if name in known}


def _train(args: argparse.Namespace, config: Config, resume: bool = False) -> int:
    start(devices=config.devices, cache=not args.no_cache)
    names = ("coordinator", "num_processes", "process_id", "heartbeat_timeout")
    processes = {name: getattr(args, name) for name in names}
    guard: Any = contextlib.nullcontext()
    if args.distributed or any(x is not None for x in processes.values()):
        parallel.initialize(**processes)
        guard = parallel.peer_guard(own_process=True)
    with guard:
        trainer = DistributedTrainer(config)
        trainer.check()  # before a directory is made
        if not resume:
            env = re.sub(r"[^A-Za-z0-9._-]+", "-", config.env).strip("-.") or "env"
            out = _claim_once(config.out or f"runs/{config.agent}-{env}-{config.seed}")
            trainer.config = trainer.config.replace(out=out)
        return _run(trainer, args, resume)


def start(*, devices: int | None = None, cache: bool = True) -> None:
    """Set JAX up before the first device is touched.

    Args:
      devices: on CPU, make so many (in each process).
      cache: keep compiled programs on disk, and use those that are there.
    """
    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not cache:
        jax.config.update("jax_enable_compilation_cache", False)  # also one of the environment's
    elif not chosen:  # not by JAX_COMPILATION_CACHE_DIR
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(base) / "jaxroll" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if devices is not None:
        with contextlib.suppress(RuntimeError):  # if a backend runs already, make_mesh counts
            jax.config.update("jax_num_cpu_devices", devices)


def claim_directory(wanted: str) -> str:
    """Make a directory of this name, or of the next free one: no run is ever written over."""
    base, number = Path(wanted), 1
    while True:
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not any(path.iterdir()):
                (path / ".lock").touch(0o644, exist_ok=False)  # one of two that find it empty
                return str(path)
        except FileExistsError:
            pass  # taken meanwhile, or a file
        except OSError as error:
            raise ValueError(
                f"cannot make the run directory {path}: {error}. Choose another with --out."
            ) from error
        number += 1


def _claim_once(wanted: str) -> str:
    """The directory that process 0 claims, on every process."""
    if jax.process_count() == 1:
        return claim_directory(wanted)
    text = claim_directory(wanted).encode() if jax.process_index() == 0 else b""
    data = np.frombuffer(text.ljust(4096, b"\0"), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data))).rstrip(b"\0").decode()


def _run(trainer: DistributedTrainer, args: argparse.Namespace, resume: bool) -> int:
    out, is_first = Path(str(trainer.config.out)), jax.process_index() == 0
    shown = is_first and not args.quiet
    if shown:
        _announce(trainer.config, resume)
    progress = "silent" if args.quiet else None
    _, history = trainer.train(resume=resume, progress=progress, on_signal="return")
    is_saved = history.saved_step == history.stopped_at
    if is_first and not is_saved:
        kept = "nothing" if history.saved_step is None else f"step {history.saved_step:,}"
        say(f"step {history.stopped_at:,} could not be saved in {out}; {kept} is on disk there.")
    if history.stopped_by in ("SIGINT", "SIGHUP", "SIGTERM"):
        if shown and is_saved:
            print(
                f"stopped by {history.stopped_by}, saved at step {history.stopped_at:,}. "
                f"Go on with: jaxroll resume {out}"
            )
        return 128 + signal.Signals[history.stopped_by] if is_saved else 1
    files = [("run", out)]
    if is_first and "episode_return" in history:  # an episode has ended
        files.append(("curve", out / "curve.png"))
        plot_runs(out, "episode_return", out=files[-1][1])  # a signal may interrupt the test
    result = trainer.test()
    if shown:
        stop = [("stopped", f"by {history.stopped_by}")] if history.stopped_by != "steps" else []
        _print_table([*stop, *_scores(result), *files])
    return 0 if is_saved else 1


def _announce(config: Config, resume: bool) -> None:
    h, end = config.hyperparameters, config.num_train_steps
    where = jax.default_backend()
    if config.devices is not None or jax.process_count() > 1:
        where = f"{config.devices or jax.device_count()} × {where}"
    seeds = f", {config.num_seeds} seeds" if config.num_seeds > 1 else ""
    actors = f", {h['num_actors']} actors" if h["num_actors"] > 1 else ""
    print(
        f"jaxroll {__version__}: {config.agent} on {config.env}, {h['num_envs']} environments × "
        f"{h['num_steps']} steps{actors}, seed {config.seed}{seeds}, {where}"
        f"{', going on in' if resume else ' →'} {config.out}"
    )
    if (decay := h.get("decay_steps")) is not None and decay < end:
        say(
            f"the learning rate is 0 from step {decay:,.0f} on, and the run ends at {end:,}. Use "
            f"--set decay_steps={end}."
        )


def _scores(result: dict[str, Any]) -> list[tuple[str, Any]]:
    score = format_mean(result["episode_return"], result["episode_return_std"])
    text = f"{score} over {result['num_episodes']} deterministic episodes"
    if "seed_returns" not in result:
        return [("return", text)]
    means = result["seed_returns"]
    each = ", ".join(f"{x:.4g}" for x in means[:16]) + " …" * (len(means) > 16)
    return [("return", f"{text} of each seed"), ("by seed", f"{format_some(means)}: {each}")]


def eval_command(args: argparse.Namespace) -> int:
    """Play whole episodes with a run's newest policy."""
    config = Config.read(args.run).replace(out=args.run, devices=None)
    start(cache=not args.no_cache)
    trainer = DistributedTrainer(config)
    trainer.load(best=args.best)
    result = trainer.test(args.num_episodes, seed=args.seed, deterministic=not args.stochastic)
    how = "stochastic" if args.stochastic else "deterministic"
    seeds = enumerate(result.get("seed_returns", ()), config.seed)
    print(f"{config.agent} on {config.env}, {args.run}")
    _print_table(
        [
            ("return", format_mean(result["episode_return"], result["episode_return_std"])),
            *((f"seed {seed}", f"{mean:.6g}") for seed, mean in seeds),
            ("length", f"{result['episode_length']:.1f}"),
            ("episodes", f"{result['num_episodes']} {how}, seed {args.seed}"),
        ]
    )
    return 0


def agents_command(args: argparse.Namespace) -> int:
    """Every agent, or the hyperparameters of one."""
    lines = {name: (cls.__doc__ or "").strip().splitlines()[0] for name, cls in AGENTS.items()}
    if args.name is None:
        print("\n".join(f"{name:<8} {line}" for name, line in lines.items()))
        print("\njaxroll agents NAME lists the hyperparameters of one.")
        return 0
    check_choice("agent", args.name, list(AGENTS))
    print(f"{args.name}: {lines[args.name]}\n")
    rows = []
    for h in AGENTS[args.name].hyperparameters().values():
        rule = h.rule or ", ".join("none" if c is None else str(c) for c in h.choices)
        note = h.help + (f" [{rule}]" if rule else "") + ("" if h.is_static else " *")
        rows.append((h.name, "none" if h.default is None else str(h.default), note))
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for name, default, note in rows:
        head = f"  {name:<{widths[0]}}  {default:<{widths[1]}}  "
        print(textwrap.fill(head + note, 100, subsequent_indent=" " * len(head)))
    print("\n* can be changed and swept without compiling anew. Set one: --set NAME=VALUE.")
    return 0


def envs_command(args: argparse.Namespace) -> int:
    """Every environment that can be made, one name a line."""
    names = list_envs(args.source)
    if not names:
        raise ValueError(
            f'{args.source} is not installed. Install it: pip install "jaxroll[{args.source}]".'
        )
    print("\n".join(names))
    return 0


def _print_table(rows: Iterable[tuple[str, Any]]) -> None:
    print("\n".join(f"  {name:<8} {text}" for name, text in rows))
