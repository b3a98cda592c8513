"""Run the long tier and keep its numbers: `python -m tests.long [pytest arguments]`.

Writes tests/RESULTS.md: each test's outcome, when it ran, and what it measured. A run of a part
(`-k learning`, say) replaces the rows of that part and leaves the others. What needs a package
that is not installed is skipped, and said to be.
"""

import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
PACKAGES = ("jaxroll", "jax", "flax", "optax", "numpy", "gymnax", "gymnasium")
COLUMNS = ("test", "outcome", "date", "seconds", "measured")


def main(arguments: list[str]) -> int:
    """Run pytest, write the results, and return pytest's code."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--slow", "--long", "-m", "slow or long"]
        code = subprocess.call(
            [*command, "-o", "junit_family=xunit1", f"--junitxml={report}", *arguments],
            cwd=RESULTS.parent.parent,
        )
        if not report.exists():
            return code
        rows = read(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        for new in folded([row(case) for case in ElementTree.parse(report).iter("testcase")]):
            if new["outcome"] != "skipped" or new["test"] not in rows:  # a number outlives a skip
                rows[new["test"]] = new
        RESULTS.write_text(page(rows), encoding="utf-8")
    print(f"results: {RESULTS.relative_to(Path.cwd()) if _is_below(RESULTS) else RESULTS.name}")
    return code


def _is_below(path: Path) -> bool:
    return path.is_relative_to(Path.cwd())


def row(case: ElementTree.Element) -> dict[str, str]:
    """One test: its name, outcome, seconds and what it recorded."""
    outcome, detail = "passed", ""
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            outcome, detail = kind, found.get("message", "").split("\n")[0]
    measured = [f"{p.get('name')}: {p.get('value')}" for p in case.iter("property")]
    return {
        "test": f"{case.get('classname', '').removeprefix('tests.')}.{case.get('name')}",
        "outcome": outcome,
        "date": datetime.date.today().isoformat(),
        "seconds": f"{float(case.get('time', 0)):.0f}",
        "measured": "<br>".join(measured) or detail,
    }


def folded(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Tests that differ by a seed only, `name[17]`, and measured nothing, as one row if alike."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for one in rows:
        name = re.sub(r"\[\d{3,}\]$", "", one["test"])
        found.setdefault((name, one["outcome"], one["measured"]), []).append(one)
    return [
        group[0]
        if len(group) == 1
        else {
            **group[0],
            "test": name,
            "seconds": str(sum(int(one["seconds"]) for one in group)),
            "measured": f"{len(group)} cases" + (f": {measured}" if measured else ""),
        }
        for (name, _, measured), group in found.items()
    ]


def read(text: str) -> dict[str, dict[str, str]]:
    """The rows of an earlier page, by test."""
    rows = {}
    for line in text.splitlines():
        cells = [c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == len(COLUMNS) and cells[0] not in (COLUMNS[0], "---"):
            rows[cells[0]] = dict(zip(COLUMNS, cells))
    return rows


def page(rows: dict[str, dict[str, str]]) -> str:
    """The Markdown page."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} (not installed)")
    outcomes = [one["outcome"] for one in rows.values()]
    counts = [
        f"{outcomes.count(o)} {o}"
        for o in ("passed", "failure", "error", "skipped")
        if o in outcomes
    ]
    lines = [
        "# Results of the long tier",
        "",
        f"Written by `python -m tests.long`: {', '.join(counts)}. What has no row here was not "
        "run.",
        "",
        f"Last run with Python {platform.python_version()}, {', '.join(versions)}; "
        f"{os.cpu_count()} CPU cores. Returns are means over 100 whole episodes, one number for "
        "each seed, sorted.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for _, one in sorted(rows.items()):
        cells = [one[name].replace("|", "\\|") for name in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
