"""A deadline for calls into host environments: one that hangs ends in an error.

The call runs in the caller's thread, at no cost. One thread watches all deadlines and interrupts a
call that is late: in the main thread by a signal, which also ends a sleep or a wait, in another
thread by an exception between two bytecodes. Code in C that never comes back to Python cannot be
interrupted; that is then said on stderr.
"""

from __future__ import annotations

import ctypes
import math
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable

from jaxroll.checks import check_number

DEFAULT_TIMEOUT = 300.0  # seconds
_SIGNAL = signal.SIGURG  # ignored by default, so one that comes late does no harm
_INTERVAL = 0.1  # seconds between looks at the clock
_GRACE = 10.0  # seconds after which an interrupted call should have ended

_lock = threading.Lock()
_watched: weakref.WeakSet[Deadline] = weakref.WeakSet()
_watcher: threading.Thread | None = None
_late: Deadline | None = None  # the one for which the signal was sent


class _Overdue(BaseException):
    """Not an Exception: an environment's own `except Exception` must not swallow it."""


class Deadline:
    """While entered, the block may take `seconds`; then `TimeoutError`.

    Args:
      seconds: None: no deadline.
      describe: what hangs, for the error; called when it does.

    Example:
      >>> with Deadline(0.05, lambda: "the nap"):
      ...     time.sleep(60)
      Traceback (most recent call last):
        ...
      TimeoutError: the nap did not return within env_timeout = 0.05 seconds.
    """

    def __init__(self, seconds: float | None, describe: Callable[[], str]):
        if seconds is not None:
            seconds = float(check_number("env_timeout", seconds, "> 0", finite=False))
        self.seconds = None if seconds == math.inf else seconds
        self._describe = describe
        self._until, self._thread, self._what, self._is_told = math.inf, 0, "", False
        if self.seconds is not None:
            _start_watching(self)

    def __enter__(self) -> Deadline:
        if self.seconds is not None:
            self._thread, self._what = threading.get_ident(), ""
            self._until = time.monotonic() + self.seconds
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._until = math.inf
        if self._what and not isinstance(error, KeyboardInterrupt | SystemExit):
            raise TimeoutError(self.message) from (None if kind is _Overdue else error)

    @property
    def message(self) -> str:
        """The text of the error."""
        what = self._what or self._describe()
        return f"{what} did not return within env_timeout = {self.seconds:g} seconds."

    def is_over(self, now: float) -> bool:
        """Whether the block should have ended; what it was doing is noted once."""
        is_over = now > self._until
        if is_over and not self._what:
            self._what = self._describe()
        return is_over

    def interrupt(self) -> None:
        """Raise in the thread that is late; called by the watching thread."""
        global _late
        _late = self
        if self._thread == threading.main_thread().ident and signal.getsignal(_SIGNAL) is _handle:
            signal.pthread_kill(self._thread, _SIGNAL)
        else:
            error = ctypes.py_object(_Overdue)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), error)
        if time.monotonic() - self._until > _GRACE and not self._is_told:
            self._is_told = True
            print(f"jaxroll: {self.message} It cannot be interrupted.", file=sys.stderr)


def _handle(number: int, frame: object) -> None:
    """Runs in the main thread."""
    if _late is not None and _late.is_over(time.monotonic()):
        raise _Overdue


def _start_watching(deadline: Deadline) -> None:
    global _watcher
    with _lock:
        _watched.add(deadline)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(_SIGNAL, _handle)
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="jaxroll deadlines", daemon=True)
        _watcher.start()


def _watch() -> None:
    while True:
        time.sleep(_INTERVAL)
        now = time.monotonic()
        with _lock:
            deadlines = list(_watched)
        for deadline in deadlines:
            if deadline.is_over(now):
                deadline.interrupt()
