"""What was measured, as JSON and as Markdown tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
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
