"""The live views of `Progress`: one line in a terminal (rich), one HTML line in a notebook.

The notebook's bar is an updatable display, not a widget: a saved notebook then holds the final
line itself, which every viewer shows, and ipywidgets is not needed.
"""

from __future__ import annotations

import contextlib
import html
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from jaxroll.reporting.progress import Progress

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BAR_WIDTH = 8, 40  # least and most columns
_STYLES = {"description": "bold", "percent": "cyan", "status": "yellow", "rate": "dim"}


class TerminalDisplay:
    """One line at the bottom of a terminal; what is printed meanwhile appears above it."""

    def __init__(self, progress: Progress, stream: TextIO):
        self._progress, self._stream = progress, stream
        self._live: Any = None
        self._console: Any = None
        self._ticks = 0
        self._unicode = _can_write(stream, "━─╸⠋±")

    def start(self) -> None:
        """Show the bar and start its thread."""
        from rich.console import Console
        from rich.live import Live

        class SteadyConsole(Console):
            def show_cursor(self, show: bool = True) -> bool:
                # Never hidden: then there is nothing to restore, not even after kill -9.
                return False

        self._console = SteadyConsole(
            file=self._stream, force_terminal=True, force_jupyter=False, highlight=False
        )
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=5,
            transient=True,
            # stdout may be a file or a pipe while stderr is the terminal: leave it alone then.
            redirect_stdout=_same_terminal(sys.stdout, self._stream),
            redirect_stderr=_same_terminal(sys.stderr, self._stream),
        )
        self._live.start(refresh=True)

    def changed(self) -> None:
        """Nothing: the thread looks at the progress by itself."""

    def message(self, text: str) -> None:
        """Print above the bar."""
        if self._console is None:
            print(text, file=self._stream)
        else:
            self._console.print(text, markup=False, soft_wrap=True)

    def stop(self, final_line: str) -> None:
        """Remove the bar, leave the final line."""
        if self._live is not None:
            self._live.stop()
        self.message(final_line)
        self._stream.flush()

    def _render(self) -> Any:
        from rich.text import Text

        self._ticks += 1
        parts = self._progress.parts()
        if "status" in parts:
            spinner = _SPINNER if self._unicode else "|/-\\"
            parts["status"] = f"{spinner[self._ticks % len(spinner)]} {parts['status']}"
        parts, bar_width = _fit(parts, self._console.width - 1)
        text = Text(no_wrap=True, overflow="crop", end="")
        if description := parts.pop("description", ""):
            text.append(f"{description} ", style=_STYLES["description"])
        full, empty = self._bar(bar_width)
        text.append(full, style="cyan").append(empty, style="bright_black")
        for name, part in parts.items():
            text.append(" " if name == "percent" else "  ").append(part, style=_STYLES.get(name))
        return text

    def _bar(self, width: int) -> tuple[str, str]:
        halves = int(2 * width * self._progress.fraction)
        whole, half = divmod(halves, 2)
        if not self._unicode:
            return "#" * whole, "-" * (width - whole)
        return "━" * whole + "╸" * half, "─" * (width - whole - half)


class NotebookDisplay:
    """One line of HTML in the output of a notebook's cell, at last replaced by plain text."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._handle: Any = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Show the bar and start its thread."""
        from IPython.display import display

        self._handle = display(self._bundle(), raw=True, display_id=True)
        self._thread = threading.Thread(target=self._run, name="jaxroll-progress", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Nothing: the thread looks at the progress by itself."""

    def message(self, text: str) -> None:
        """Print below the bar."""
        print(text)

    def stop(self, final_line: str) -> None:
        """Replace the bar by the final line."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if self._handle is not None:
            self._handle.update({"text/plain": final_line}, raw=True)

    def _run(self) -> None:
        while not self._done.wait(0.5):
            with contextlib.suppress(Exception):  # a front end that went away
                self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        progress = self._progress
        parts = progress.parts()
        head = html.escape(parts.pop("description"))
        rest = html.escape(" · ".join(part.strip() for part in parts.values()))
        value = f'value="{progress.fraction:.4f}"'
        if progress.current_status is not None and progress.step == progress.start:
            value = ""  # a bar without a value is one that moves to and fro
        bar = f'<progress {value} max="1" style="width: 14em; vertical-align: middle"></progress>'
        style = "font-variant-numeric: tabular-nums; white-space: nowrap"
        return {
            "text/plain": progress.line(),
            "text/html": f'<div style="{style}"><b>{head}</b> {bar} {rest}</div>',
        }


def _fit(parts: dict[str, str], width: int) -> tuple[dict[str, str], int]:
    """Drop the least important parts until the bar has its room; the bar takes what is left."""
    numbers = [name for name in parts if name.startswith("number ")]
    droppable = [*reversed(numbers[1:]), "count", "rate", "description", *numbers[:1], "left"]
    parts = dict(parts)
    while True:
        bar_width = width - sum(len(part) + 2 for part in parts.values() if part)
        if bar_width >= _BAR_WIDTH[0] or not droppable:
            return parts, max(0, min(_BAR_WIDTH[1], bar_width))
        parts.pop(droppable.pop(0), None)


def _can_write(stream: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _same_terminal(stream: Any, terminal: TextIO) -> bool:
    """Whether what is written to `stream` would land in the middle of the bar."""
    import os

    try:
        return stream is terminal or os.ttyname(stream.fileno()) == os.ttyname(terminal.fileno())
    except (AttributeError, OSError, ValueError):
        return False
