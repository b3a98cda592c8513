"""Numbers as people read them, and text that any output can print."""

from __future__ import annotations

import codecs
from typing import IO, Any

PLAIN = "jaxroll.plain"  # how a stream may treat what its encoding lacks
_ASCII = dict(zip("…±–−×≥≤→λ", ["...", "+/-", "-", "-", "x", ">=", "<=", "->", "lambda"]))


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(x, "?") for x in error.object[error.start : error.end]), error.end


codecs.register_error(PLAIN, _plain)


def printable(text: str, stream: IO[str]) -> str:
    """The text with the characters that the stream's encoding lacks written in ASCII.

    Example:
      >>> import io
      >>> printable("490 ± 10 → …", io.TextIOWrapper(io.BytesIO(), "ascii"))
      '490 +/- 10 -> ...'
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding, PLAIN).decode(encoding)
    except LookupError:  # an encoding that Python does not know
        return text.encode("ascii", PLAIN).decode()


def format_count(value: float) -> str:
    """Three significant digits and a letter.

    Example:
      >>> [format_count(x) for x in (0, 950, 1500, 999_999, 12_345_678, 3e9)]
      ['0', '950', '1.5k', '1M', '12.3M', '3B']
    """
    value = float(f"{value:.3g}")  # rounded first: 999,999 is a million
    for letter in ("", "k", "M", "B"):
        if abs(value) < 1000:
            return f"{value:.4g}{letter}"
        value /= 1000
    return f"{value:.4g}T"


def format_seconds(seconds: float) -> str:
    """A time span.

    Example:
      >>> [format_seconds(s) for s in (0.25, 12.34, 75, 3661)]
      ['0.2 s', '12.3 s', '1:15', '1:01:01']
    """
    return f"{seconds:.1f} s" if seconds < 59.95 else format_clock(seconds)


def format_clock(seconds: float) -> str:
    """Whole seconds as on a clock, so that a running one does not change its width.

    Example:
      >>> format_clock(5.9), format_clock(3661)
      ('0:05', '1:01:01')
    """
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_number(value: float) -> str:
    """About four significant digits with a steady number of decimals.

    Example:
      >>> [format_number(x) for x in (0, 487.31, -12.5, 0.01234, 1e-5, 123_456.7, 2.5e8)]
      ['0.00', '487.3', '-12.50', '0.012', '1.00e-05', '123,457', '2.50e+08']
    """
    return f"{value:{_digits(value)}}"


def format_mean(mean: float, spread: float) -> str:
    """A mean ± its spread, both with the decimals of the mean.

    Example:
      >>> format_mean(490.0, 10.04), format_mean(12_345.6, 1.7), format_mean(-0.5, 0.01)
      ('490.0 ± 10.0', '12,346 ± 2', '-0.500 ± 0.010')
    """
    return f"{format_number(mean)} ± {spread:{_digits(mean)}}"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return ".2e"
    decimals = 3 if 0 < size < 1 else 2 if size < 100 else 1 if size < 1000 else 0
    return f",.{decimals}f"


def format_some(value: Any) -> str | None:
    """A number as text; several as mean ± spread without those that are NaN; None for no number.

    Example:
      >>> format_some(0.5), format_some([1.0, 3.0, float("nan")]), format_some(None)
      ('0.500', '2.00 ± 1.00', None)
    """
    import numpy as np  # not for `jaxroll --help`

    values = np.ravel(np.asarray(value, np.float64))  # None becomes NaN
    values = values[~np.isnan(values)]
    if values.size > 1 and np.isfinite(values).all():
        return format_mean(float(values.mean()), float(values.std()))
    return format_number(float(values.mean())) if values.size else None
