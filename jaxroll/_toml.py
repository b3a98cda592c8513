"""Values as TOML: what `tomllib` reads, written. None is the string "none"."""

from __future__ import annotations

import re
from typing import Any

# What a basic string must not hold as it is, and what some editors take for line ends.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def toml_value(value: Any) -> str:
    r"""One value on one line.

    Example:
      >>> print(toml_value([True, 1e-05, 'a "word"', None, {"x": 1}]))
      [true, 1e-05, "a \"word\"", "none", { x = 1 }]
    """
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list):
        return f"[{', '.join(toml_value(v) for v in value)}]"
    if isinstance(value, dict):
        items = ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items())
        return f"{{ {items} }}" if items else "{}"
    return repr(value)


def toml_key(key: str) -> str:
    """A key, quoted where it has to be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _UNPRINTABLE.sub(lambda m: f"\\u{ord(m.group()):04x}", escaped) + '"'
