"""Imports go one way only, and importing touches no device."""

import ast
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import jaxroll

PACKAGE = pathlib.Path(jaxroll.__file__).parent
TIERS = [
    {"_version", "_lazy", "checks"},
    {"types", "spaces"},
    {"sums", "counts", "varying"},
    {
        "estimators",
        "losses",
        "distributions",
        "normalizers",
        "metrics",
    },
    {"storages"},
    {"networks", "envs", "learner", "parallel"},
    {"collectors", "export"},
    {"agents"},
    {"train"},
    {"config", "sweeps"},
    {"trainer"},
    {"cli"},
    {"commands"},
    {"__main__"},
]
# Inside a method only: agent.train, eval, save and load.
UPWARD = {("agents/shell.py", "train")}
TIER = {part: i for i, parts in enumerate(TIERS) for part in parts}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def part_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path):
    """The parts of jaxroll that a file imports, anywhere in it."""
    here = ["jaxroll", *path.relative_to(PACKAGE).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "jaxroll" and len(parts) > 1:
                yield node.lineno, parts[1]


def test_the_layout_page_names_every_part():
    page = (PACKAGE.parent / "docs" / "package_layout.md").read_text()
    named = set(re.findall(r"(\w+)(?:/|\.py)", page.split("```")[1])) - {"jaxroll"}
    exist = {part_of(p) for p in MODULES if not p.name.startswith("_") or p.name == "__init__.py"}
    tops = {part for part in exist if not part.startswith("_")}
    assert tops <= named, f"docs/package_layout.md does not name {sorted(tops - named)}"
    gone = named - {name for p in MODULES for name in p.relative_to(PACKAGE).with_suffix("").parts}
    assert not gone, f"docs/package_layout.md names {sorted(gone)}, which do not exist"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    part = part_of(path)
    assert part in TIER, f"{part} is in no tier; add it to TIERS in this test"
    for line, other in imported_parts(path):
        if other == part or (str(path.relative_to(PACKAGE)), other) in UPWARD:
            continue
        if other in jaxroll.__all__ and other not in TIER:
            pytest.fail(f"line {line}: import {other} from its module, not from jaxroll")
        assert other in TIER, f"line {line}: {other} is in no tier"
        assert TIER[other] < TIER[part], f"line {line}: {other} is not below {part}"


def test_imports_are_found():
    found = {part for _, part in imported_parts(PACKAGE / "storages" / "rollout.py")}
    assert found >= {"estimators", "storages", "types"}


@pytest.mark.parametrize("package", ["jaxroll", "jaxroll.train"])
def test_every_name_of_the_stub_resolves(package):
    module = importlib.import_module(package)
    stub = pathlib.Path(module.__file__).with_suffix(".pyi").read_text()
    names = re.findall(r"(\w+) as (\w+)", stub)
    assert len(names) > 10
    for name, alias in names:
        assert name == alias
        assert getattr(module, name) is not None
        assert name in dir(module)
    assert set(module.__all__) <= dict(names).keys()


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if p.name == "__init__.py" and p.read_text().strip()],
    ids=lambda p: p.parent.name,
)
def test_every_room_says_what_is_public(path):
    parts = path.parent.relative_to(PACKAGE.parent).parts
    module = importlib.import_module(".".join(parts))
    for name in module.__all__:
        assert getattr(module, name) is not None, name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jaxroll.nothing


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def test_importing_the_package_imports_no_jax():
    code = "import sys, jaxroll; print('jax' in sys.modules, 'numpy' in sys.modules)"
    assert run(code) == "False False"


def test_using_every_name_starts_no_backend():
    code = (
        "import jaxroll\n"
        "for name in jaxroll.__all__: getattr(jaxroll, name)\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    assert run(code) == "False"


def public_names():
    """(module, name) of what the package offers, and of what users of its modules extend."""
    names = [("jaxroll", name) for name in jaxroll.__all__ if not name.startswith("_")]
    names += [("jaxroll.envs", "register_source"), ("jaxroll.collectors", "evaluate_host")]
    wrappers = ("TimeLimit", "FlattenObservation", "FrameStack", "ClipAction")
    names += [("jaxroll.envs.wrappers", name) for name in wrappers]
    return names + [("jaxroll.agents.hyperparameters", name) for name in ("leaf", "static")]


@pytest.mark.parametrize(("module", "name"), public_names())
def test_every_public_name_has_an_example_that_runs(module, name):
    assert ">>>" in (getattr(importlib.import_module(module), name).__doc__ or "")
