"""The command line: `jaxroll train | eval | resume | plot | envs | agents`.

Commands are imported when they run, so that help costs no jax. A mistake of the user's is one
message and exit code 2; a failure of the run is 1; see `EXIT_CODES` for all of them.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxroll.cli.parser import EXIT_CODES, UsageError, parse
from jaxroll.train import signals
from jaxroll.train.text import PLAIN

__all__ = ["EXIT_CODES", "main"]

_PACKAGE = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit code.

    Args:
      argv: the words after `jaxroll`; None: those of this process.

    Example:
      >>> main(["agents"])  # doctest: +ELLIPSIS
      ppo ...
      0
    """
    with signals.own_process():  # first: no signal is lost from here on
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(argv: list[str]) -> int:
    _open_streams()
    debug = os.environ.get("JAXROLL_DEBUG", "0") not in ("", "0") or "--traceback" in argv
    for stream in (sys.stdout, sys.stderr):  # ASCII and latin-1 have neither … nor ±
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)
    # XLA's remarks about cached programs would land in the middle of the bar.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        args = parse(argv)
        if isinstance(args, int):
            return args
        command = importlib.import_module(f"jaxroll.cli.{args.module}")
        return getattr(command, args.function)(args)
    except UsageError as error:
        return _fail(2, str(error))
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _explain(error, debug)


def _open_streams() -> None:
    """Make streams that are closed lead nowhere."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:  # or the next file that is opened would be the stream
                opened = os.open(os.devnull, os.O_RDWR)
                if opened != number:
                    os.dup2(opened, number)
                    os.close(opened)
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115


def _explain(error: Exception, debug: bool) -> int:
    """One message for what a user can put right, a traceback for what looks like our fault."""
    if _is_lost_peer(error):
        message = str(error).strip().splitlines()[0]
        print(
            f"jaxroll: another process of this run is gone ({message}). Start all of them again "
            "with `jaxroll resume RUN`: the run goes on from its last checkpoint.",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        # An ordinary exit would wait for the lost peer, and abort.
        os._exit(EXIT_CODES["a peer process is gone"])
    if debug:
        traceback.print_exception(error)
    if isinstance(error, ValueError | TypeError | ImportError | LookupError | FileExistsError):
        if _is_ours(error):
            return _fail(2, str(error.args[0] if error.args else error))
    elif isinstance(error, FileNotFoundError) and _is_ours(error):
        return _fail(2, str(error))
    if isinstance(error, OSError | ArithmeticError) or _is_checkpoint_error(error):
        return _fail(1, str(error))
    if isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED"):
        reason = str(error).splitlines()[0] if str(error) else "MemoryError"
        return _fail(1, f"there is too little memory ({reason}). Use fewer num_envs or num_steps.")
    if not debug:
        traceback.print_exception(error)
    return _fail(1, "this was not expected; see the traceback above")


def _fail(code: int, message: str) -> int:
    print(f"jaxroll: {message}", file=sys.stderr)
    return code


def _is_ours(error: BaseException) -> bool:
    """Whether a check of jaxroll's raised it, rather than a library in its depths."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return Path(trace.tb_frame.f_code.co_filename).resolve().is_relative_to(_PACKAGE)


def _is_checkpoint_error(error: BaseException) -> bool:
    return any(cls.__module__ == "jaxroll.train.step_files" for cls in type(error).__mro__)


def _is_lost_peer(error: BaseException) -> bool:
    jax: Any = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return False
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__  # pyright: ignore[reportAssignmentType]
    return False
