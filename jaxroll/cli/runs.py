"""`jaxroll eval` and `jaxroll plot`: what is done with finished runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from jaxroll.checks import near_matches
from jaxroll.cli.parser import UsageError
from jaxroll.config import Config
from jaxroll.train.text import format_mean


def eval_command(args: argparse.Namespace) -> int:
    """Play whole episodes with a run's newest policy."""
    config = Config.read(args.run).replace(out=args.run, devices=None)
    from jaxroll.cli.startup import start
    from jaxroll.trainer import DistributedTrainer

    start(cache=not args.no_cache)
    trainer = DistributedTrainer(config)
    trainer.load(best=args.best)
    result = trainer.test(args.num_episodes, seed=args.seed, deterministic=not args.stochastic)
    how = "stochastic" if args.stochastic else "deterministic"
    rows = [("return", format_mean(result["episode_return"], result["episode_return_std"]))]
    if "seed_returns" in result:
        seeds = range(config.seed, config.seed + config.num_seeds)
        rows += [
            (f"seed {seed}", f"{mean:.6g}") for seed, mean in zip(seeds, result["seed_returns"])
        ]
    rows += [
        ("length", f"{result['episode_length']:.1f}"),
        ("episodes", f"{result['num_episodes']} {how}, seed {args.seed}"),
    ]
    print(f"{config.agent} on {config.env}, {args.run}")
    print("\n".join(f"  {name:<8} {text}" for name, text in rows))
    return 0


def plot_command(args: argparse.Namespace) -> int:
    """Draw columns of runs into a file."""
    runs = [word for word in args.runs if os.path.exists(word)]
    names = [word for word in args.runs if not os.path.exists(word)]
    for name in names:
        if os.sep in name or not runs:
            parent = Path(name).parent
            there = [str(p) for p in parent.iterdir()] if parent.is_dir() else []
            hint = near_matches(name, there) if there else ""
            raise UsageError(f"there is no run at {name}. {hint}".strip())
    from jaxroll.train.plot import plot_runs

    runs = _with_rows(runs)
    default = Path(runs[0]) / "curve.png" if len(runs) == 1 and Path(runs[0]).is_dir() else None
    out = Path(args.out) if args.out else default or Path("curve.png")
    plot_runs(
        runs,
        names or None,
        x=args.x,
        band=None if args.band == "none" else args.band,
        smooth=args.smooth,
        title=args.title,
        out=out,
    )
    print(out)
    return 0


def _with_rows(runs: list[str]) -> list[str]:
    """The runs that have metrics; of `runs/*`, others are named and left out."""
    empty = [run for run in runs if os.path.isdir(run) and not _has_rows(Path(run))]
    if empty and len(empty) == len(runs):
        raise UsageError(f"{', '.join(empty)} has no metrics to draw yet.")
    for run in empty:
        print(f"jaxroll: {run} has no metrics and is left out.", file=sys.stderr)
    return [run for run in runs if run not in empty]


def _has_rows(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0
