"""A live view of long work: a bar in a terminal or a notebook, plain lines in a file, or nothing.

The bar is drawn by its own thread, so it runs on while the first compile or a long chunk of work
holds the caller, and `update` only stores a few numbers. It goes to stderr: what a program prints
to stdout stays clean. One bar at a time; on several processes, `enabled` is for the first only.
"""

from __future__ import annotations

import collections
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TextIO

from jaxroll.reporting._format import (
    format_clock,
    format_count,
    format_duration,
    format_mean,
    format_number,
    near_matches,
)

Mode = Literal["auto", "bar", "lines", "silent"]
_MODES = ("auto", "bar", "lines", "silent")
_WINDOW = 20.0  # seconds over which the speed is measured
_MAX_SAMPLES = 512
_Samples = collections.deque[tuple[float, int]]  # (seconds at work, step); never empty


class Display(Protocol):
    """Where a `Progress` shows itself."""

    def start(self) -> None:
        """Begin to show."""

    def changed(self) -> None:
        """The progress has new numbers or a new status; must be cheap."""

    def message(self, text: str) -> None:
        """Show a line of text that stays."""

    def stop(self, final_line: str) -> None:
        """Take the live view away and leave one line."""


class Progress:
    """Steps done, steps/s, time left and a few numbers, while the work goes on.

    Args:
      total_steps: where the work ends.
      description: what is being done, such as "ppo CartPole-v1".
      start: the step where this process starts; more than 0 after a resume.
      mode: "bar", "lines" (a line every few seconds), "silent", or "auto": a bar in a terminal
        and in a notebook, else lines.
      enabled: False shows nothing; pass `jax.process_index() == 0` on several processes.
      unit: what is counted.
      file: where to write; None: stderr.
      clock: seconds; another one is for tests.

    Example:
      >>> with Progress(100, description="demo", mode="lines", file=sys.stdout) as progress:
      ...     with progress.status("compiling"):
      ...         pass
      ...     progress.update(100, episode_return=[480.0, 500.0])  # doctest: +ELLIPSIS
      demo: compiling …
      demo: 100 steps in ... s (... steps/s), return 490.0 ± 10.0
    """

    def __init__(
        self,
        total_steps: int,
        *,
        description: str = "",
        start: int = 0,
        mode: Mode = "auto",
        enabled: bool = True,
        unit: str = "steps",
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if mode not in _MODES:
            raise ValueError(
                f"mode must be one of {', '.join(_MODES)}, got {mode!r}. "
                + near_matches(str(mode), _MODES)
            )
        if total_steps < 0 or start < 0:
            raise ValueError(
                f"total_steps and start must be ≥ 0, got total_steps={total_steps}, start={start}."
            )
        self.total_steps = int(total_steps)
        self.description = description
        self.unit = unit
        self.start = int(start)
        self.step = int(start)
        self.numbers: dict[str, str] = {}  # name → text, newest values
        self.current_status: str | None = None
        self._clock = clock
        self._began = self._status_since = clock()
        self._paused = 0.0  # seconds spent under a status
        self._samples = _Samples([(0.0, self.step)], _MAX_SAMPLES)
        self._display = _make_display(self, mode if enabled else "silent", file)

    def __enter__(self) -> Progress:
        self._began = self._status_since = self._clock()
        self._display.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: Any) -> None:
        self.close(failed=exc_type is not None)

    def close(self, failed: bool = False) -> None:
        """Leave the final line in place of the live view: the end of `with`, or of the process."""
        # A closed terminal must not turn a finished run into a failed one.
        with contextlib.suppress(OSError, ValueError):
            self._display.stop(self.final_line(failed=failed))

    def update(self, step: int, **numbers: Any) -> None:
        """Say how far the work is; costs microseconds, call it as often as you like.

        Args:
          step: steps done so far, `start` included.
          **numbers: host numbers to show beside the bar. Arrays, such as one return for each
            seed, show as mean ± standard deviation; None and NaN leave the last value.
        """
        now = self._clock()
        # Before the step: the first array imports numpy, and the bar must not show the new step
        # beside old numbers meanwhile.
        texts = {_label(name): _summary(value) for name, value in numbers.items()}
        if any(texts.values()):
            self.numbers = {**self.numbers, **{k: text for k, text in texts.items() if text}}
        ran = int(step) != self.step
        self.step = int(step)
        if not self._is_status_over(now, ran=ran):
            self._sample(self._active(now))
        self._display.changed()

    def begin(self, step: int, *, resumed: bool = False) -> None:
        """What was to be prepared is done: the work itself begins, at this step.

        Args:
          step: where it begins.
          resumed: whether the steps before it are those of another process.
        """
        self.step = int(step)
        self.start = self.step if resumed else self.start
        now = self._clock()
        self._set_status(None, now)
        self._samples = _Samples([(self._active(now), self.step)], _MAX_SAMPLES)
        self._display.changed()

    def status(self, text: str | None) -> contextlib.AbstractContextManager[None]:
        """Show what holds the work up, with a clock, until the next `update` or the end of `with`.

        Its time does not count for steps/s.

        Example:
          >>> progress = Progress(10, mode="silent")
          >>> with progress.status("evaluating"):
          ...     progress.current_status
          'evaluating'
          >>> progress.current_status is None
          True
        """
        self._set_status(text, self._clock())
        self._display.changed()
        return self._until_exit()

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        with contextlib.suppress(OSError, ValueError):
            self._display.message(text)

    @property
    def fraction(self) -> float:
        """Part of the work that is done, between 0 and 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 1.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    def rate(self) -> float | None:
        """Steps per second of late; None before it is known."""
        samples = list(self._samples)
        (t0, s0), (t1, s1) = samples[0], samples[-1]
        if t1 > t0 and s1 > s0:
            return (s1 - s0) / (t1 - t0)
        return None  # one sample since a status that steps ran in: the compilation is no speed

    def parts(self) -> dict[str, str]:
        """What to show, by name: description, percent, count, rate, left, numbers or status."""
        parts = {
            "description": self.description,
            "percent": f"{math.floor(100 * self.fraction):3d}%",
            "count": f"{format_count(self.step)}/{format_count(self.total_steps)} {self.unit}",
        }
        if self.current_status is not None:
            waited = format_clock(self._clock() - self._status_since)
            parts["status"] = f"{self.current_status} {waited}"
        elif (rate := self.rate()) is not None:
            # Between rare updates the time left goes on counting down.
            since_update = self._active(self._clock()) - self._samples[-1][0]
            left = (self.total_steps - self.step) / rate - since_update
            parts["rate"] = f"{format_count(rate)} {self.unit}/s"
            parts["left"] = f"{format_clock(max(0.0, left))} left"
        return parts | {f"number {k}": f"{k} {text}" for k, text in self.numbers.items()}

    def line(self) -> str:
        """The parts on one plain line."""
        parts = self.parts()
        head = parts.pop("description")
        rest = "  ".join(part.strip() for part in parts.values())
        return f"{head}: {rest}" if head else rest

    def final_line(self, failed: bool = False) -> str:
        """What stays after the end: steps, time, steps/s, last numbers."""
        done, seconds = self.step - self.start, self.elapsed
        count = f"{self.step:,} {self.unit}"
        if failed or self.step < self.total_steps:
            count = f"{self.step:,} of {self.total_steps:,} {self.unit}"
        if failed:
            count = f"stopped at {count}"
        if self.start:
            count += f" ({done:,} of them now)"
        rate = f" ({format_count(done / seconds)} {self.unit}/s)" if done and seconds > 0 else ""
        head = f"{self.description}: " if self.description else ""
        numbers = "".join(f", {name} {text}" for name, text in self.numbers.items())
        return f"{head}{count} in {format_duration(seconds)}{rate}{numbers}"

    def _active(self, now: float) -> float:
        return now - self._began - self._paused

    def _sample(self, active: float) -> None:
        samples = self._samples
        if len(samples) > 1 and active - samples[-2][0] < _WINDOW / 256:
            samples[-1] = (active, self.step)  # frequent updates share a sample
        else:
            samples.append((active, self.step))
        while len(samples) > 2 and active - samples[0][0] > _WINDOW:
            samples.popleft()

    def _is_status_over(self, now: float, *, ran: bool) -> bool:
        """End the status, if there is one; steps that `ran` within it have no speed."""
        if self.current_status is None:
            return False
        self._set_status(None, now)
        if ran:
            self._samples = _Samples([(self._active(now), self.step)], _MAX_SAMPLES)
        return True

    def _set_status(self, text: str | None, now: float) -> None:
        if self.current_status is not None:
            self._paused += now - self._status_since
        self.current_status, self._status_since = text, now

    @contextlib.contextmanager
    def _until_exit(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._set_status(None, self._clock())
            self._display.changed()


class LinesDisplay:
    """Plain lines: the first after 5 seconds, then every 5 to 60, rarer as the run gets longer."""

    def __init__(self, progress: Progress, file: TextIO):
        self._progress, self._file = progress, file
        self._last = 0.0
        self._status: str | None = None

    def start(self) -> None:
        """Nothing to show yet."""

    def changed(self) -> None:
        """Write a line, if it is time for one or the first status is there."""
        progress = self._progress
        status, self._status = self._status, progress.current_status
        elapsed = progress.elapsed
        if self._status is not None and self._status != status and not progress.numbers:
            head = f"{progress.description}: " if progress.description else ""
            self._write(f"{head}{self._status} …")
        elif self._status is None and elapsed - self._last >= min(60.0, max(5.0, elapsed / 20)):
            self._last = elapsed
            self._write(progress.line())

    def message(self, text: str) -> None:
        """Write the text."""
        self._write(text)

    def stop(self, final_line: str) -> None:
        """Write the last line."""
        self._write(final_line)

    def _write(self, text: str) -> None:
        # A log file that cannot be written to, or is closed, must not end the run.
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._file, flush=True)


class SilentDisplay:
    """Shows nothing."""

    def start(self) -> None:
        """Nothing."""

    def changed(self) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def stop(self, final_line: str) -> None:
        """Nothing."""


def _make_display(progress: Progress, mode: Mode, file: TextIO | None) -> Display:
    if mode == "silent":
        return SilentDisplay()
    notebook = file is None and _in_notebook()
    # In a notebook stderr is shown like an error; plain lines belong to stdout there.
    stream = file if file is not None else sys.stdout if notebook else sys.stderr
    if mode == "lines":
        return LinesDisplay(progress, stream)
    if notebook:
        from jaxroll.reporting.displays import NotebookDisplay

        return NotebookDisplay(progress)
    if mode == "bar" or _is_terminal(stream):
        from jaxroll.reporting.displays import TerminalDisplay

        return TerminalDisplay(progress, stream)
    return LinesDisplay(progress, stream)


def _is_terminal(stream: TextIO) -> bool:
    import os

    try:
        return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    except ValueError:  # closed
        return False


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code; a terminal IPython has no kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython  # pyright: ignore[reportPrivateImportUsage]

    return hasattr(get_ipython(), "kernel")


def _label(name: str) -> str:
    return name.replace("episode_", "").replace("_", " ")


def _summary(value: Any) -> str | None:
    """A number as text; several as mean ± spread; None if there is none."""
    if value is None:
        return None
    if not isinstance(value, float | int):
        import numpy as np

        values = np.asarray(value, np.float64)
        values = values[np.isfinite(values)]
        if values.size > 1:
            return format_mean(float(values.mean()), float(values.std()))
        value = float(values[0]) if values.size else math.nan
    return None if math.isnan(value) else format_number(float(value))
