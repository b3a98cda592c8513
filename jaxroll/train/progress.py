"""A live view of long work: a bar in a terminal or a notebook, plain lines elsewhere, or nothing.

The bar is drawn by its own thread, so that it moves on while the first compilation or a long
dispatch holds the caller; `update` only stores a few numbers. It goes to stderr: what a program
prints to stdout stays clean. On several processes, `enabled` is for the first only.
"""

from __future__ import annotations

import contextlib
import html
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TextIO

import rich.console
import rich.progress
import rich.table
import rich.text

from jaxroll.checks import check_choice, check_count
from jaxroll.train.text import format_clock, format_count, format_seconds, format_some, printable

Mode = Literal["auto", "bar", "lines", "silent"]
_STEPS = {"at_least": 0, "below": 2**63}
_WINDOW = 10.0  # seconds over which the speed is averaged


class Progress:
    """Steps done, steps/s, time left and a few numbers, while the work goes on.

    Args:
      total_steps: where the work ends.
      description: what is being done, such as "ppo CartPole-v1".
      mode: "bar", "lines" (a line every few seconds), "silent", or "auto": a bar in a terminal
        and in a notebook, else lines. Without a stderr, as under cron: silent.
      enabled: False shows nothing; pass `jax.process_index() == 0` on several processes.
      file: where to write; None: stderr.
      clock: seconds; another one is for tests.

    Example:
      >>> with Progress(100, description="demo", mode="lines", file=sys.stdout) as progress:
      ...     progress.status("compiling")
      ...     progress.begin(0)
      ...     progress.update(100, episode_return=[480.0, 500.0])  # doctest: +ELLIPSIS
      demo: compiling …
      demo: 100 steps in ... s (... steps/s), return 490.0 ± 10.0
    """

    def __init__(
        self,
        total_steps: int,
        *,
        description: str = "",
        mode: Mode = "auto",
        enabled: bool = True,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        check_choice("mode", mode, ("auto", "bar", "lines", "silent"))
        self.total_steps = check_count("total_steps", total_steps, **_STEPS)
        self.step = self.start = 0  # `begin` sets them after a resume
        self.description, self.head = description, f"{description}: " if description else ""
        self.numbers: dict[str, str] = {}  # name → text, newest values
        self.current_status: str | None = None
        self.rate: float | None = None  # steps per second, lately; None before it is known
        self._clock = clock
        self._began = self._status_since = clock()
        self._held: dict[str, float] = {}  # seconds under each status, which count for no speed
        self._timed = 0  # steps done outside of any status
        self._measured = (0.0, 0)  # working seconds and step up to which the rate is known
        self._recent = (0.0, 0.0)  # steps and their seconds, older ones with less weight
        self._view = _make_view(self, mode if enabled else "silent", file)

    def __enter__(self) -> Progress:
        self._began = self._status_since = self._clock()
        self._view.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: Any) -> None:
        self.close(failed=exc_type is not None)

    def close(self, failed: bool = False) -> None:
        """Leave one final line in place of the live view."""
        self.status(None)
        # A closed terminal must not turn a finished run into a failed one.
        with contextlib.suppress(OSError, ValueError):
            self._view.stop(self.final_line(failed=failed))

    def update(self, step: int, **numbers: Any) -> None:
        """Say how far the work is; takes microseconds. Ends a status.

        Args:
          step: steps done so far, those before a resume included.
          **numbers: host numbers to show beside the bar. Arrays, such as one return for each
            seed, show as mean ± standard deviation; None and NaN leave the last value.
        """
        for name, value in numbers.items():
            if text := format_some(value):
                label = name.replace("episode_", "").replace("_", " ")
                self.numbers = {**self.numbers, label: text}  # a new one: the bar's thread reads it
        done, self.step = check_count("step", step, **_STEPS) - self.step, step
        now, (since, first) = self._working_seconds(), self._measured
        if self.current_status is None:
            self._timed += done
            if step > first and now > since:
                steps, seconds = self._recent
                old = math.exp((since - now) / _WINDOW)  # fades away
                self._recent = steps * old + step - first, seconds * old + now - since
                self.rate = self._recent[0] / self._recent[1]
                self._measured = now, step
        elif done:  # how long the steps themselves took is not known
            self._measured = now, step
        self.status(None)

    def begin(self, step: int, *, resumed: bool = False) -> None:
        """Say that preparations are over, and the work itself begins at this step.

        Args:
          step: where it begins.
          resumed: whether another process did the steps before it.
        """
        self.step = int(step)
        self.start = self.step if resumed else self.start
        self._measured = (self._working_seconds(), self.step)
        self.status(None)

    def status(self, text: str | None) -> None:
        """Show what holds the work up, with a clock, until the next `update`; None ends it.

        Its time does not count for steps/s; the final line names it.

        Example:
          >>> progress = Progress(10, mode="silent")
          >>> progress.status("evaluating")
          >>> progress.parts()
          ['0%', 'evaluating 0:00', '0/10 steps']
        """
        now = self._clock()
        if self.current_status is not None:
            held = self._held.get(self.current_status, 0.0) + now - self._status_since
            self._held = {**self._held, self.current_status: held}  # a new one, as above
        self.current_status, self._status_since = text, now
        self._view.changed()

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        with contextlib.suppress(OSError, ValueError):
            self._view.message(text)

    @property
    def fraction(self) -> float:
        """Part of the work that is done, between 0 and 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 1.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    def parts(self) -> list[str]:
        """What to show, the most important first."""
        parts = [f"{math.floor(100 * self.fraction)}%"]
        status, since, rate = self.current_status, self._status_since, self.rate
        if status is not None:
            parts.append(f"{status} {format_clock(self._clock() - since)}")
        elif rate is not None:  # between rare updates the time left goes on counting down
            left = (self.total_steps - self.step) / rate
            left -= self._working_seconds() - self._measured[0]
            parts.append(f"{format_clock(max(0.0, left))} left")
        parts += [f"{name} {text}" for name, text in self.numbers.items()]
        if status is None and rate is not None:
            parts.append(f"{format_count(rate)} steps/s")
        return [*parts, f"{format_count(self.step)}/{format_count(self.total_steps)} steps"]

    def final_line(self, failed: bool = False) -> str:
        """What stays at the end: steps, their time and speed, other times, newest numbers."""
        is_part = failed or self.step < self.total_steps
        line = f"{self.head}{'stopped at ' if failed else ''}{self.step:,}"
        line += f" of {self.total_steps:,} steps" if is_part else " steps"
        line += f" ({self.step - self.start:,} of them now)" if self.start else ""
        seconds = self._working_seconds()
        line += f" in {format_seconds(seconds)}"
        if self._timed > 0 and seconds > 0:
            line += f" ({format_count(self._timed / seconds)} steps/s)"
        others = [f"{s} {format_seconds(t)}" for s, t in self._held.items() if t >= 0.05]
        return ", ".join([line, *others, *(f"{n} {text}" for n, text in self.numbers.items())])

    def _working_seconds(self) -> float:
        """Since the start, without what passed under a status."""
        now = self._clock() if self.current_status is None else self._status_since
        return now - self._began - sum(self._held.values())


class _Silent:
    """Where a `Progress` shows itself: nowhere."""

    def start(self) -> None: ...
    def changed(self) -> None: ...
    def message(self, text: str) -> None: ...
    def stop(self, final_line: str) -> None: ...


class _Lines(_Silent):
    """Plain lines: the first after 5 seconds, then every 5 to 60, rarer as the run gets longer."""

    def __init__(self, progress: Progress, stream: TextIO):
        self._progress, self._stream, self._last = progress, stream, 0.0

    def changed(self) -> None:
        progress, elapsed = self._progress, self._progress.elapsed
        if progress.current_status is not None:
            if not progress.numbers:
                self.message(f"{progress.head}{progress.current_status} …")
        elif progress.step == progress.start:
            return
        elif elapsed - self._last >= min(60.0, max(5.0, elapsed / 20)):
            self._last = elapsed
            self.message(progress.head + "  ".join(progress.parts()))

    def message(self, text: str) -> None:
        # A log file that cannot be written to, or is closed, must not end the run.
        with contextlib.suppress(OSError, ValueError):
            print(printable(text, self._stream), file=self._stream, flush=True)

    def stop(self, final_line: str) -> None:
        self.message(final_line)


class _Console(rich.console.Console):
    def show_cursor(self, show: bool = True) -> bool:
        return False  # never hidden: then there is nothing to restore, not even after kill -9


class _Parts(rich.progress.ProgressColumn):
    """As many of the progress's parts as fit beside a short bar."""

    def __init__(self, progress: Progress, console: rich.console.Console):
        super().__init__(rich.table.Column(no_wrap=True))
        self._progress, self._console = progress, console

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        parts = [printable(part, self._console.file) for part in self._progress.parts()]
        width = self._console.width - len(task.description) - 10
        while len(parts) > 1 and len("  ".join(parts)) > width:
            parts.pop()
        return rich.text.Text("  ".join(parts))


class _Bar(_Silent):
    """One line at the bottom of a terminal; what is printed meanwhile appears above it."""

    def __init__(self, progress: Progress, stream: TextIO):
        self._progress, self._stream = progress, stream
        self._console = _Console(
            file=stream, force_terminal=True, force_jupyter=False, highlight=False
        )
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", "bold", markup=False),
            rich.progress.BarColumn(None, complete_style="cyan", finished_style="cyan"),
            _Parts(progress, self._console),
            console=self._console,
            refresh_per_second=5,
            transient=True,
            # stdout may be a file or a pipe while stderr is the terminal: leave it alone then.
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        description = progress.description if self._console.width >= 60 else ""
        self._task = self._bar.add_task(printable(description, stream), total=1.0)
        self.start = self._bar.start

    def changed(self) -> None:
        self._bar.update(self._task, completed=self._progress.fraction)

    def message(self, text: str) -> None:
        self._console.print(printable(text, self._stream), markup=False, soft_wrap=True)

    def stop(self, final_line: str) -> None:
        self._bar.stop()
        self.message(final_line)
        self._stream.flush()


class _Notebook(_Silent):
    """One line of HTML below a notebook's cell, in the end replaced by plain text.

    An updatable display, not a widget: a saved notebook then holds the final line, which every
    viewer shows, and ipywidgets is not needed.
    """

    def __init__(self, progress: Progress):
        self._progress, self._handle, self._done = progress, None, threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxroll-progress", daemon=True)

    def start(self) -> None:
        from IPython.display import display

        self._handle: Any = display(self._bundle(), raw=True, display_id=True)
        self._thread.start()

    def message(self, text: str) -> None:
        print(text)

    def stop(self, final_line: str) -> None:
        self._done.set()
        if self._handle is not None:
            self._thread.join()
            self._handle.update({"text/plain": final_line}, raw=True)

    def _run(self) -> None:
        while not self._done.wait(0.5):
            with contextlib.suppress(Exception):  # a front end that went away
                self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        head, parts = self._progress.description, self._progress.parts()
        bar = f'<progress value="{self._progress.fraction:.4f}" max="1"></progress>'
        text = f"<b>{html.escape(head)}</b> {bar} {html.escape(' · '.join(parts))}"
        style = "font-variant-numeric: tabular-nums; white-space: nowrap"
        return {
            "text/plain": self._progress.head + "  ".join(parts),
            "text/html": f'<div style="{style}">{text}</div>',
        }


def _make_view(progress: Progress, mode: Mode, file: TextIO | None) -> _Silent:
    notebook = file is None and rich.console.Console().is_jupyter
    # In a notebook stderr is shown like an error; plain lines belong to stdout there.
    stream = file if file is not None else sys.stdout if notebook else sys.stderr
    if mode == "silent" or stream is None:  # a process may have been started without a stderr
        return _Silent()
    if mode != "lines" and notebook:
        return _Notebook(progress)
    if mode == "bar" or (mode == "auto" and _is_terminal(stream)):
        return _Bar(progress, stream)
    return _Lines(progress, stream)


def _is_terminal(stream: Any) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    except (AttributeError, ValueError):  # none, or closed
        return False
