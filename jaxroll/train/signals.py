"""Ctrl-C, SIGTERM and SIGHUP: the first saves and ends the run, a second ends it at once.

Handlers only note the signal, since an exception raised by one is lost if it lands in a callback of
the garbage collector. Python runs them between bytecodes, and a compilation can hold the main
thread for many seconds. So in a process of our own (the command line, `own_process`) a thread reads
the signals as they arrive: with nothing to save the process ends at once, otherwise within `BOUND`
seconds. In a user's process nothing is ended hard: `Interrupts` raises `KeyboardInterrupt` or
`SystemExit`, and an environment that hangs is left after `BOUND` seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BOUND = 9.0  # seconds from the first signal to the end, or until an environment that hangs is left
_LAST_WORDS = 0.5  # seconds
_OWN: list[Interrupts] = []  # that of a process of our own


class Interrupts:
    """While entered, signals set `received`.

    Attributes:
      own_process: whether the process is ours to end.
      received: the number of the first signal, or None.
      nothing_to_save: while True, a signal ends the work at once.
      can_leave: says whether the main thread may be interrupted where it is now.
      on_exit: called with the signal's name before the process is ended hard; it has half a second.
    """

    def __init__(self, *, own_process: bool = False):
        self.own_process = own_process
        self.received: int | None = None
        self.nothing_to_save = True
        self.can_leave: Callable[[], bool] = lambda: False
        self.on_exit: Callable[[str], None] = _say_ended
        self._old: dict[int, Any] = {}
        self._sockets: tuple[socket.socket, ...] = ()
        self._timer: threading.Timer | None = None
        self._is_overdue = False

    @property
    def name(self) -> str:
        """The signal's name, such as "SIGTERM"; empty if none came."""
        return signal.Signals(self.received).name if self.received else ""

    def check(self) -> None:
        """Raise if a signal came: `KeyboardInterrupt`, or `SystemExit` with 128 + its number."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received:
            raise SystemExit(128 + self.received)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread can have handlers; the caller's stay
        for number in NUMBERS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            self._old[number] = signal.signal(number, self._handle)
        if self.own_process:
            reader, writer = self._sockets = socket.socketpair()
            writer.setblocking(False)
            signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._timer is not None and not self.own_process:
            self._timer.cancel()
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._sockets:
            signal.set_wakeup_fd(-1)
        for end in self._sockets:
            end.close()

    def _handle(self, number: int, frame: Any) -> None:
        is_first, self.received = self.received is None, self.received or number
        if self.own_process:
            return  # the thread does the rest
        if self._is_overdue:
            self._is_overdue = False
            if not self.can_leave():
                return
        elif is_first and not self.nothing_to_save:
            self._start_timer(self._leave)
            return
        self.check()

    def _leave(self) -> None:
        self._is_overdue = True
        # To the thread itself, so that a sleep or a wait there is interrupted.
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, self.received or signal.SIGINT)

    def _start_timer(self, function: Callable[..., None], *args: Any) -> None:
        self._timer = threading.Timer(BOUND, function, args=args)
        self._timer.daemon = True
        self._timer.start()

    def _watch(self, reader: socket.socket) -> None:
        is_first = True
        with contextlib.suppress(OSError):  # the socket is closed
            while data := reader.recv(1):
                number = data[0]
                if number not in self._old:
                    continue
                if self.nothing_to_save or not is_first:
                    self._end(number)
                is_first = False
                self.received = self.received or number
                self._start_timer(self._end, number)

    def _end(self, number: int) -> None:
        def say() -> None:
            with contextlib.suppress(Exception):
                self.on_exit(signal.Signals(number).name)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()

        # In a thread: a terminal or a disk that does not answer must not keep the process.
        words = threading.Thread(target=say, daemon=True)
        words.start()
        words.join(_LAST_WORDS)
        os._exit(128 + number)


@contextlib.contextmanager
def own_process() -> Iterator[Interrupts]:
    """While entered, the process is ours: every `interrupts()` is the one made here."""
    with Interrupts(own_process=True) as made:
        _OWN.append(made)
        try:
            yield made
        finally:
            _OWN.remove(made)


@contextlib.contextmanager
def interrupts(on_exit: Callable[[str], None], own_process: bool = False) -> Iterator[Interrupts]:
    """The signals of a run: those of a process of our own, or new ones for as long as it is."""
    with contextlib.ExitStack() as stack:
        made = _OWN[-1] if _OWN else stack.enter_context(Interrupts(own_process=own_process))
        made.on_exit = on_exit
        try:
            yield made
        finally:
            made.nothing_to_save, made.on_exit = True, _say_ended


def _say_ended(name: str) -> None:
    print(f"jaxroll: ended by {name}.", file=sys.stderr)
