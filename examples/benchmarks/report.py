"""What was measured, as JSON and as Markdown tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterable
from typing import Any

import jax
from harness import Row, Spread

_PACKAGES = (
    "jaxroll",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "gymnax",
    "numpy",
    "rlax",
    "distrax",
    "flashbax",
    "brax",
    "rejax",
    "gymnasium",
    "stable-baselines3",
    "torch",
)

BEGIN, END = "<!-- speed, written by examples/benchmarks/run.py -->", "<!-- end speed -->"


def machine() -> dict[str, Any]:
    """What it ran on, and with which versions."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    device = jax.devices()[0]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "device": f"{device.platform}: {device.device_kind}",
        "load": round(load, 2),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": versions,
    }


def measured(about: dict[str, Any]) -> str:
    """When, on what, and beside how much other work, in one line."""
    return (
        f"Measured on {about['date']}, {about['processor']}, {about['cores']} cores, jaxroll "
        f"{about['versions']['jaxroll']}, jax {about['versions']['jax']}, load {about['load']}."
    )


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()


# What the README shows: what is compared, section, ratio.
_SUMMARY = (
    (
        "PPO on CartPole, whole training in one jit: purejaxrl form / jaxroll",
        "ppo",
        "purejaxrl form / jaxroll",
    ),
    ("the same: rejax / jaxroll", "ppo", "rejax / jaxroll"),
    (
        "PPO on MinAtar Breakout with the same MLP: purejaxrl form / jaxroll",
        "minatar",
        "purejaxrl form / jaxroll",
    ),
    ("PPO on CartPole: Stable-Baselines3 / jaxroll", "sb3", "stable-baselines3 / jaxroll"),
    ("launches of a PPO update: purejaxrl form / jaxroll", "launches", "purejaxrl form / jaxroll"),
    ("GAE: jaxroll / rlax", "gae", "jaxroll / rlax"),
    ("V-trace: rlax / jaxroll", "vtrace", "rlax / jaxroll"),
    (
        "an epoch of minibatches: permute, take and reshape / jaxroll",
        "minibatches",
        "purejaxrl form / jaxroll",
    ),
    ("`add` / stacking the outputs of the scan", "storage", "jaxroll / stacking"),
    ("`collect` / a scan written by hand", "collector", "jaxroll / by hand"),
    ("`HostCollector` / a bare loop", "host", "jaxroll / bare loop"),
    ("exact / fast reduction", "exact", "exact / fast"),
    ("one device / two, sharing two cores", "devices", "1 device / 2 devices"),
)


def summary(rows: list[Row]) -> str:
    """The README's table of ratios, as they were measured; what has no rows is left out."""
    lines = ["| compared | ratio |", "| --- | --- |"]
    for what, section, label in _SUMMARY:
        found = {
            row.case: spread.median
            for row in rows
            if row.section == section
            for ratio, spread in row.ratios
            if ratio.label == label
        }
        if len(found) > 4:
            low, high = min(found.values()), max(found.values())
            lines.append(f"| {what} | {low:.2f}–{high:.2f} over {len(found)} cases |")
        elif found:
            shown = [f"{name}: {x:.2f}" for name, x in zip(_short(list(found)), found.values())]
            lines.append(f"| {what} | {'; '.join(shown)} |")
    return "\n".join(lines)


def _short(cases: list[str]) -> list[str]:
    """The cases without the words that all of them start with."""
    parts = [re.split(r", (?![^(]*\))", case) for case in cases]
    while all(len(words) > 1 for words in parts) and len({words[0] for words in parts}) == 1:
        parts = [words[1:] for words in parts]
    return [", ".join(words) for words in parts]


def write_summary(rows: list[Row], readme: pathlib.Path) -> None:
    """Put `summary` between the README's two marks."""
    text = readme.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} must have the marks {BEGIN!r} and {END!r}.")
    text = f"{head}{begin}\n{summary(rows)}\n{end}{tail}"
    readme.write_text(text, encoding="utf-8")


def as_json(rows: Iterable[Row], about: dict[str, Any], command: str, clock: str) -> str:
    """The results file."""
    data = {
        "command": command,
        "clock": clock,
        "machine": about,
        "rows": [row.as_json() for row in rows],
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def as_markdown(
    rows: list[Row], about: dict[str, Any], command: str, clock: str, sections: dict[str, str]
) -> str:
    """Tables by section.

    Args:
      rows: what was measured.
      about: from `machine`.
      command: that makes the same file again.
      clock: by which it was timed.
      sections: heading of each section.
    """
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v != "not installed")
    missing = [k for k, v in about["versions"].items() if v == "not installed"]
    lines = [
        "# Results",
        "",
        f"Written by `{command}` on {about['date']}. Contenders take turns in one process; "
        f"ratios and times ({clock} clock) are medians with their quartiles, compilation apart.",
        "",
        f"- Machine: {about['processor']}, {about['cores']} cores, {about['device']}, load "
        f"{about['load']} at the start",
        f"- {about['platform']}, Python {about['python']}",
        f"- {versions}",
    ]
    if missing:
        lines.append(f"- Not installed, so not compared: {', '.join(missing)}")
    for section, heading in sections.items():
        own = [row for row in rows if row.section == section]
        if own:
            # A section of an earlier run says when and on what that was.
            earlier = [] if own[0].measured == measured(about) else [own[0].measured, ""]
            lines += ["", f"## {heading}", "", *earlier, *_table(own)]
    return "\n".join(lines) + "\n"


def _table(rows: list[Row]) -> list[str]:
    lines = ["| case | time | ratio | target | |", "| --- | --- | --- | --- | --- |"]
    notes: list[str] = []
    for row in rows:
        times = "<br>".join(
            [_time(name, spread, row.steps) for name, spread in row.times.items()]
            + [f"{name} {count:,}" for name, count in row.counts.items()]
        )
        ratios = "<br>".join(
            f"{ratio.label} = **{spread.median:.2f}** ({spread.low:.2f}–{spread.high:.2f})"
            for ratio, spread in row.ratios
        )
        targets = "<br>".join(ratio.target or " " for ratio, _ in row.ratios)
        marks = "<br>".join(
            {True: "met", False: "missed", None: " "}[ratio.met(spread.median)]
            for ratio, spread in row.ratios
        )
        lines.append(f"| {row.case} | {times} | {ratios} | {targets} | {marks} |")
        if row.temporary_bytes:
            sizes = ", ".join(f"{k} {size(v)}" for k, v in row.temporary_bytes.items())
            notes.append(f"{row.case}: temporary memory {sizes}")
        notes += row.notes
    notes = list(dict.fromkeys(notes))
    return lines + ([""] + [f"- {note}" for note in notes] if notes else [])


def _time(name: str, spread: Spread, steps: int | None) -> str:
    text = f"{name} {duration(spread.median)}"
    if steps:
        text += f" ({steps / spread.median:,.0f} steps/s)"
    return text


def duration(seconds: float) -> str:
    """A time with three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return (
                f"{seconds * scale:.3g} {unit}"
                if seconds * scale >= 10
                else (f"{seconds * scale:.2f} {unit}")
            )
    return f"{seconds * 1e9:.0f} ns"


def size(count: int) -> str:
    """A number of bytes."""
    if count < 0:
        return "unknown"
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def show(row: Row) -> None:
    """One row on the terminal, as soon as it is there."""
    times = ", ".join(
        [f"{name} {duration(spread.median)}" for name, spread in row.times.items()]
        + [f"{name} {count:,}" for name, count in row.counts.items()]
    )
    print(f"{row.section}: {row.case}: {times}", file=sys.stdout)
    for ratio, spread in row.ratios:
        verdict = {True: "met", False: "missed", None: ""}[ratio.met(spread.median)]
        goal = f"  target {ratio.target} {verdict}" if ratio.target else ""
        text = f"    {ratio.label} = {spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"
        print(text + goal, file=sys.stdout)
    for note in row.notes:
        print(f"    {note}", file=sys.stdout)
    sys.stdout.flush()
