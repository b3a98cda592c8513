"""jaxroll: rollouts, advantages and minibatches as parts that live inside your own jit.

`__init__.pyi` lists the public names, for type checkers and for the code below. A name loads when
it is first used, so that `import jaxroll` costs next to nothing and touches no device. See the
README for the conventions (axes, truncation, keys, logical actors).
"""

import ast
import importlib
from pathlib import Path

_MODULE_OF = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(statement, ast.ImportFrom) and statement.module
    for alias in statement.names
}
__all__ = [name for name, module in _MODULE_OF.items() if module != "jaxroll"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxroll' has no attribute {name!r}")
    module = _MODULE_OF[name]
    if module == "jaxroll":
        return importlib.import_module(f"jaxroll.{name}")
    globals()[name] = value = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
