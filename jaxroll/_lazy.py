"""Names of a package that load when they are first used. Imports little, for it is part of each."""

import ast
import importlib
import sys


def attach(package: str, file: str):
    """`__getattr__`, `__dir__` and `__all__` of a package, from the imports in its `__init__.pyi`.

    Type checkers read the same stub. A module (`from package import module`) is not in `__all__`.
    """
    with open(f"{file}i", encoding="utf-8") as stub:
        statements = ast.parse(stub.read()).body
    home = {
        alias.name: statement.module
        for statement in statements
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }

    def get(name: str):
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    public = [name for name, module in home.items() if module != package]
    return get, lambda: sorted({*vars(sys.modules[package]), *home}), public
