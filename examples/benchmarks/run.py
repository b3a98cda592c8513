"""Time jaxroll side by side with what one would use instead: `python examples/benchmarks/run.py`.

Prints rows as they are measured, and writes RESULTS.md and results.json beside this file and the
table of the README (`--out`: files elsewhere). Sections can be named; the rows of others stay as
they are in the files.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from harness import Row, Settings, Spread

HERE = pathlib.Path(__file__).resolve().parent
# Loops over arrays of up to this many bytes run without handing single operations to threads.
SMALL_LOOPS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=100000000"
# name → (module, function, heading, options of its process: None, if alone, runs it in this one)
_SECTIONS: dict[str, tuple[str, str, str, dict[str, str] | None]] = {
    "gae": ("kernels", "gae", "GAE", None),
    "gae-small-loops": (
        "kernels",
        "gae",
        f"GAE with `XLA_FLAGS={SMALL_LOOPS}`",
        {"XLA_FLAGS": SMALL_LOOPS},
    ),
    "vtrace": ("kernels", "vtrace", "V-trace", None),
    "distributions": ("kernels", "distributions", "Distributions", None),
    "storage": ("memory", "storage", "Storage", None),
    "minibatches": ("memory", "minibatches", "Minibatches", None),
    "ppo": ("training", "ppo", "PPO, CartPole", None),
    "minatar": ("training", "minatar", "PPO, MinAtar Breakout", None),
    "impala": ("training", "impala", "IMPALA", None),
    "versions": ("versions", "versions", "Before and after", {}),
    "launches": ("launches", "launches", "Launches of one PPO update", None),
    "collector": ("training", "collector", "Collector", None),
    "seeds": ("training", "seeds", "Vmapped seeds", None),
    "exact": ("training", "exact", "Exact and fast reduction", None),
    "devices": (
        "training",
        "devices",
        "One device and two",
        {"JAX_NUM_CPU_DEVICES": "2"},
    ),
    "host": ("hosts", "host", "Host environments", None),
    "sb3": ("hosts", "stable_baselines", "Stable-Baselines3", {}),
    "learning": ("learning", "learning", "Equal learning", None),
    "startup": ("hosts", "startup", "Start-up", {}),
}
SECTIONS = tuple(_SECTIONS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run sections, print rows as they come, and write the results.

    Args:
      argv: the command line; None: the process's own. `--help` lists the options.

    Returns:
      0; 1 if a section failed. A target that is missed is shown, and is no failure.
    """
    options = _parser().parse_args(argv)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], SECTIONS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = ", ".join(SECTIONS)
        print(f"There is no section {unknown[0]!r}; there are {known}.{hint}", file=sys.stderr)
        return 2
    if options.out is None and not options.quick:
        options.out = HERE
    settings = Settings.create(
        quick=options.quick, full=options.full, clock=options.clock, baseline=options.baseline
    )
    names = options.sections or list(SECTIONS)
    if options.child:
        rows = _run_here(names[0], settings)
        print(json.dumps([row.as_json() for row in rows]))
        return 0

    import report

    about = report.machine()
    rows, failed = [], []
    for name in names:
        try:
            found = _run(name, settings, options, alone=len(names) == 1)
        except Exception as error:  # one section's fault leaves the others' rows
            failed.append(name)
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        for row in found:
            row.measured = report.measured(about)
            report.show(row)
        rows += found
        if options.out is not None:  # after each section: a run that is cut short leaves its rows
            _write(options, rows, about)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python examples/benchmarks/run.py",
        description="Time jaxroll side by side with what one would use instead.",
    )
    parser.add_argument(
        "sections", nargs="*", metavar="section", help=f"which: {', '.join(SECTIONS)}; none: all"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--full", action="store_true", help="longer: narrower spreads")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: time on all cores, for a machine that others use",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIRECTORY",
        help="where to write results.json and RESULTS.md, unless --quick beside this file; "
        "other sections' rows there stay",
    )
    parser.add_argument(
        "--baseline",
        metavar="CHECKOUT",
        help="another checkout of jaxroll, for the section versions",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def _run(name: str, settings: Settings, options: argparse.Namespace, *, alone: bool) -> list[Row]:
    """The rows of a section.

    Of several sections each has a process of its own: what an earlier one compiled, and the memory
    that it gave back, would change the times of a later one.
    """
    environment = _SECTIONS[name][3]
    if environment is None and alone:
        return _run_here(name, settings)
    environment = environment or {}
    command = [sys.executable, str(HERE / "run.py"), name, "--child", "--clock", settings.clock]
    command += ["--baseline", settings.baseline] if settings.baseline else []
    command += ["--quick"] if options.quick else []
    command += ["--full"] if options.full else []
    variables = {**os.environ, **environment}
    if environment.get("XLA_FLAGS"):
        own = os.environ.get("XLA_FLAGS", "")
        variables["XLA_FLAGS"] = f"{own} {environment['XLA_FLAGS']}".strip()
    start = time.perf_counter()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"its process ended with {done.returncode}: {tail[0]}")
    rows = [Row.from_json(row) for row in json.loads(done.stdout.strip().splitlines()[-1])]
    if name == "startup":
        rows[0].times["whole process"] = Spread.of([time.perf_counter() - start])
    return rows


def _run_here(name: str, settings: Settings) -> list[Row]:
    module, function, _, _ = _SECTIONS[name]
    section: Callable[[Settings], list[Row]] = getattr(importlib.import_module(module), function)
    rows = section(settings)
    for row in rows:
        row.section = name
    return rows


def _write(options: argparse.Namespace, rows: list[Row], about: dict) -> None:
    """Write what was measured; sections that are in the files already and not in `rows` stay."""
    import report

    words = ["python", "examples/benchmarks/run.py", *options.sections]
    words += [f"--{flag}" for flag in ("quick", "full") if getattr(options, flag)]
    words += [] if options.clock == "wall" else ["--clock", options.clock]
    words += ["--baseline", "CHECKOUT"] if options.baseline else []
    command = " ".join(words)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.json"
    known = json.loads(results.read_text(encoding="utf-8"))["rows"] if results.exists() else []
    fresh = {row.section for row in rows}
    rows = [Row.from_json(row) for row in known if row["section"] not in fresh] + rows
    rows = sorted(rows, key=lambda row: SECTIONS.index(row.section))
    headings = {name: section[2] for name, section in _SECTIONS.items()}
    results.write_text(report.as_json(rows, about, command, options.clock), encoding="utf-8")
    text = report.as_markdown(rows, about, command, options.clock, headings)
    (options.out / "RESULTS.md").write_text(text, encoding="utf-8")
    if options.out.resolve() == HERE:
        report.write_summary(rows, HERE.parents[1] / "README.md")


if __name__ == "__main__":
    sys.exit(main())
