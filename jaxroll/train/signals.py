"""Ctrl-C and SIGTERM: the first saves and ends the run, a second ends it at once.

Python runs its signal handlers only between bytecodes, and a compilation can hold the main thread
for many seconds. So in a process of our own (`own_process=True`, the command line) a thread reads
the signals as they arrive: with nothing to save the process ends at once, and whatever happens it
ends within `bound` seconds, and a moment for its last words.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

_LAST_WORDS = 0.5  # seconds


class Interrupts:
    """While entered, SIGINT and SIGTERM set `received` instead of raising.

    Args:
      own_process: whether the process is ours to end.
      bound: seconds from the first signal to the end of such a process.
      on_exit: called with the signal's name before the process is ended hard: to put the terminal
        right, to say what is saved. It has half a second.

    Attributes:
      received: the number of the first signal, or None.
      nothing_to_save: while True, a signal ends the work at once.
    """

    def __init__(
        self,
        *,
        own_process: bool = False,
        bound: float = 9.0,
        on_exit: Callable[[str], None] = lambda name: None,
    ):
        self.received: int | None = None
        self.nothing_to_save = True
        self._own_process, self._bound, self._on_exit = own_process, bound, on_exit
        self._old: dict[int, Any] = {}
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    @property
    def name(self) -> str:
        """The signal's name, such as "SIGTERM"."""
        return signal.Signals(self.received).name if self.received else ""

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread can have handlers; the caller's stay
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._handle)
        if self._own_process:
            reader, writer = self._sockets = socket.socketpair()
            writer.setblocking(False)
            signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._sockets is not None:
            signal.set_wakeup_fd(-1)
            for end in self._sockets:
                end.close()

    def _handle(self, number: int, frame: Any) -> None:
        if self._own_process:
            self.received = self.received or number  # the thread does the rest
            return
        if self.nothing_to_save or self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        self.received = number

    def _watch(self, reader: socket.socket) -> None:
        first = True
        while True:
            try:
                data = reader.recv(1)
            except OSError:
                return
            if not data:
                return
            number = data[0]
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            if self.nothing_to_save or not first:
                self._end(number)
            first = False
            self.received = self.received or number
            timer = threading.Timer(self._bound, self._end, args=(number,))
            timer.daemon = True
            timer.start()

    def _end(self, number: int) -> None:
        # In a thread: a terminal or a disk that does not answer must not keep the process.
        words = threading.Thread(target=self._say, args=(number,), daemon=True)
        words.start()
        words.join(_LAST_WORDS)
        os._exit(128 + number)

    def _say(self, number: int) -> None:
        with contextlib.suppress(Exception):
            self._on_exit(signal.Signals(number).name)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
