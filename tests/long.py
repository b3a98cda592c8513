"""Run the long tier and keep its numbers: `python -m tests.long [pytest arguments]`.

Writes tests/RESULTS.md: each test's outcome and what it measured. What needs a package that is
not installed is skipped, and said to be.
"""

import os
import platform
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
PACKAGES = ("jaxroll", "jax", "flax", "optax", "numpy", "gymnax", "gymnasium")


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
        cases = ElementTree.parse(report).iter("testcase")
        RESULTS.write_text(page([row(case) for case in cases], arguments), encoding="utf-8")
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
        "seconds": f"{float(case.get('time', 0)):.0f}",
        "measured": "<br>".join(measured) or detail,
    }


def page(rows: list[dict[str, str]], arguments: list[str]) -> str:
    """The Markdown page."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} (not installed)")
    counts = [
        f"{sum(r['outcome'] == o for r in rows)} {o}"
        for o in ("passed", "failure", "error", "skipped")
    ]
    lines = [
        "# Results of the long tier",
        "",
        f"`{shlex.join(['python', '-m', 'tests.long', *arguments])}`: {', '.join(counts)}.",
        "",
        f"Python {platform.python_version()}, {', '.join(versions)}; {os.cpu_count()} CPU cores. "
        "Returns are means over 100 whole episodes, one number for each seed, sorted.",
        "",
        "| test | outcome | seconds | measured |",
        "| --- | --- | ---: | --- |",
    ]
    for r in rows:
        cells = [r[k].replace("|", "\\|") for k in ("test", "outcome", "seconds", "measured")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
