"""Progress, seen as a user sees it: on a terminal's screen, in a file, in a notebook."""

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading

import numpy as np
import pytest

from jaxroll.train import Progress

# As from a shell: tests that run in the background have it ignored.
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""

HEAD = """
import sys
from jaxroll.train import Progress
wait = sys.stdin.readline
"""

RUN = (
    HEAD
    + """
with Progress(500_000, description="ppo CartPole-v1") as progress:
    progress.status("compiling")
    wait()
    progress.begin(0)
    progress.update(250_000, episode_return=[100.0, 140.0])
    wait()
    progress.message("saved [bold] at 250k")
    print("a user's print")
    progress.status("evaluating")
    wait()
    progress.update(500_000, episode_return=[480.0, 500.0])
    wait()
print("done")
"""
)


class Screen:
    """Enough of a terminal to know what a person sees."""

    def __init__(self, width):
        self.width, self.lines, self.row, self.column = width, [[]], 0, 0

    def feed(self, text):
        pieces = re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.", text, re.DOTALL)
        for piece in pieces:
            if piece == "\n":
                self.row, self.column = self.row + 1, 0
            elif piece == "\r":
                self.column = 0
            elif piece.startswith("\x1b["):
                self.control(piece[2:-1], piece[-1])
            else:
                if self.column == self.width:  # wraps, as terminals do
                    self.row, self.column = self.row + 1, 0
                self.put(piece)

    def control(self, number, kind):
        if kind == "A":
            self.row = max(0, self.row - int(number or 1))
        elif kind == "K":
            assert number == "2"
            self.line()[:] = []
        else:
            assert kind == "m", f"unexpected control {number}{kind}"

    def line(self):
        while len(self.lines) <= self.row:
            self.lines.append([])
        return self.lines[self.row]

    def put(self, character):
        line = self.line()
        line.extend(" " * (self.column + 1 - len(line)))
        line[self.column] = character
        self.column += 1

    def text(self):
        return "\n".join("".join(line).rstrip() for line in self.lines).strip()


class Terminal:
    """A Python program on a pseudo-terminal; stdin is a pipe that it waits on."""

    def __init__(self, code, width=120, stdout="terminal", **environment):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave, self.screen, self.raw = slave, Screen(width), ""
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE + code],
            stdin=subprocess.PIPE,
            stdout=slave if stdout == "terminal" else subprocess.PIPE,
            stderr=slave,
            text=True,
            env={**env, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
        )
        self.watchdog = threading.Timer(60, self.process.kill)
        self.watchdog.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.watchdog.cancel()
        self.process.kill()
        self.process.communicate()
        os.close(self.master)
        os.close(self.slave)

    def read(self):
        text = os.read(self.master, 65536).decode(errors="replace").replace("\r\n", "\n")
        self.raw += text
        self.screen.feed(text)

    def until(self, pattern):
        """Reads until the screen shows it; the watchdog ends a wait in vain."""
        while not re.search(pattern, self.screen.text()):
            assert self.process.poll() is None, f"ended without {pattern}:\n{self.screen.text()}"
            os.set_blocking(self.master, False)
            try:
                self.read()
            except BlockingIOError:
                threading.Event().wait(0.02)
        return self.screen.text()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self):
        """What is on the screen after the end, and what went to a piped stdout."""
        out, _ = self.process.communicate(timeout=60)
        os.set_blocking(self.master, False)
        try:
            while True:
                self.read()
        except BlockingIOError:
            return self.screen.text(), out


def test_terminal_shows_compiling_then_a_bar_then_one_final_line():
    with Terminal(RUN) as terminal:
        # Its own thread draws: the program is stuck, and the clock runs.
        shown = terminal.until(r"compiling 0:0[1-9]")
        assert re.fullmatch(r"ppo CartPole-v1 ━+ 0%  compiling 0:0[1-9]  0/500k steps", shown)
        terminal.go_on()
        shown = terminal.until("250k/500k")
        shown_parts = r"50%  \S+ left  return 120.0 ± 20.0  \S+ steps/s  250k/500k steps"
        assert re.search(r"━+[╸╺]━+ " + shown_parts, shown)
        terminal.go_on()
        shown = terminal.until("evaluating")
        above = shown.splitlines()
        assert above[0] == "saved [bold] at 250k"
        assert above[1] == "a user's print"
        assert len(above) == 3  # and the bar below them
        terminal.go_on()
        terminal.until("100%")
        terminal.go_on()
        shown, _ = terminal.finish()
        assert terminal.process.returncode == 0
        lines = shown.splitlines()
        assert lines[:2] == ["saved [bold] at 250k", "a user's print"]
        assert re.fullmatch(
            r"ppo CartPole-v1: 500,000 steps in \S+ s \(\S+ steps/s\), compiling \S+ s, "
            r"evaluating \S+ s, return 490.0 ± 10.0",
            lines[2],
        )
        assert lines[3:] == ["done"]  # nothing of the bar is left
        assert "\x1b[?25l" not in terminal.raw  # the cursor was never hidden
        assert termios.tcgetattr(terminal.slave) == terminal.before


@pytest.mark.parametrize("width", [30, 60, 80])
def test_narrow_terminal_still_gets_one_line(width):
    with Terminal(RUN, width=width) as terminal:
        terminal.until("compiling 0:00")
        terminal.go_on()
        shown = terminal.until("50%")
        assert len(shown.splitlines()) == 1
        assert len(shown) <= width


@pytest.mark.parametrize("kind", ["interrupt", "exception"])
def test_terminal_is_left_clean_when_the_work_fails(kind):
    last = {
        "interrupt": "    while True:\n        time.sleep(0.01)\n",
        "exception": '    wait()\n    raise RuntimeError("broken")\n',
    }
    code = HEAD + (
        'with Progress(1000, description="demo") as progress:\n    progress.update(400)\n'
    )
    code = "import time\n" + code + last[kind]
    with Terminal(code) as terminal:
        terminal.until("400/1k")
        if kind == "interrupt":
            terminal.process.send_signal(signal.SIGINT)
        else:
            terminal.go_on()
        shown, _ = terminal.finish()
        lines = shown.splitlines()
        assert re.match(r"demo: stopped at 400 of 1,000 steps in .+", lines[0])
        assert (
            lines[-1]
            == {"interrupt": "KeyboardInterrupt", "exception": "RuntimeError: broken"}[kind]
        )
        assert "━" not in shown
        assert terminal.process.returncode != 0
        assert termios.tcgetattr(terminal.slave) == terminal.before


def test_bar_on_stderr_leaves_a_piped_stdout_alone():
    code = HEAD + (
        "with Progress(10) as progress:\n"
        "    wait()\n"
        '    print("result 1")\n'
        "    progress.update(10)\n"
        'print("result 2")\n'
    )
    with Terminal(code, stdout="pipe") as terminal:
        terminal.until("0/10 steps")
        terminal.go_on()
        shown, out = terminal.finish()
        assert out == "result 1\nresult 2\n"
        assert "result" not in shown


def test_terminal_without_unicode_gets_an_ascii_bar():
    with Terminal(RUN, PYTHONUTF8="0", PYTHONIOENCODING="ascii") as terminal:
        terminal.until("compiling")
        terminal.go_on()
        shown = terminal.until("50%")
        assert re.search(r"-+ -+ 50%.*return 120.0 \+/- 20.0", shown)
        assert shown.isascii()


@pytest.mark.parametrize("environment", [{}, {"TERM": "dumb"}])
def test_plain_lines_when_piped_or_dumb(environment):
    with Terminal(RUN, **environment) as terminal:
        if not environment:  # the same program with stderr in a pipe
            run = subprocess.run(
                [sys.executable, "-c", RUN],
                input="\n" * 4,
                capture_output=True,
                text=True,
                check=True,
            )
            assert run.stdout == "a user's print\ndone\n"
            assert "\x1b" not in run.stderr
            assert "\r" not in run.stderr
            lines = run.stderr.splitlines()
        else:
            terminal.process.stdin.write("\n" * 4)
            terminal.process.stdin.flush()
            lines = [
                x for x in terminal.finish()[0].splitlines() if x not in ("a user's print", "done")
            ]
    assert lines[0] == "ppo CartPole-v1: compiling …"
    assert lines[1] == "saved [bold] at 250k"
    assert lines[-1].startswith("ppo CartPole-v1: 500,000 steps in ")
    assert len(lines) == 3


@pytest.mark.parametrize("options", ['mode="silent"', "enabled=False"])
def test_silent_is_silent(options):
    code = RUN.replace('description="ppo CartPole-v1"', options)
    with Terminal(code) as terminal:
        for _ in range(4):
            terminal.go_on()
        assert terminal.finish()[0] == "a user's print\ndone"


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def lines_of(durations, total=100):
    """Equal steps of these durations → what stands in the file."""
    clock, file = Clock(), io.StringIO()
    with Progress(total, description="x", mode="lines", file=file, clock=clock) as progress:
        for i, seconds in enumerate(durations):
            clock.now += seconds
            progress.update(total * (i + 1) // len(durations), loss=0.5)
    return file.getvalue().splitlines()


def test_lines_come_every_few_seconds_not_with_each_update():
    lines = lines_of([1 / 128] * 2560, total=2560)  # 20 seconds, 2560 updates
    assert len(lines) == 4 + 1  # after 5, 10, 15 and 20 s, and the last
    assert lines[0] == "x: 25%  0:15 left  loss 0.500  128 steps/s  640/2.56k steps"
    assert lines[-1] == "x: 2,560 steps in 20.0 s (128 steps/s), loss 0.500"
    a_day = lines_of([1.0] * 86_400)
    assert 100 < len(a_day) < 1600  # at most one a minute in the end


def test_speed_counts_neither_the_compile_nor_the_evaluations():
    clock = Clock()
    with Progress(1000, mode="silent", clock=clock) as progress:
        progress.status("compiling")
        clock.now += 60
        progress.update(100)  # ran within the compile: no speed of its own yet
        for step in range(200, 600, 100):
            clock.now += 1
            progress.update(step)
            progress.status("evaluating")
            clock.now += 30
            progress.update(step)
        assert progress.rate == pytest.approx(100)
        clock.now += 2
        assert "0:03 left" in progress.parts()
        progress.update(600)
        assert progress.fraction == 0.6
    want = "600 of 1,000 steps in 6.0 s (83.3 steps/s), compiling 1:00, evaluating 2:00"
    assert progress.final_line() == want


def test_no_speed_is_shown_before_it_is_known():
    clock = Clock()
    with Progress(1000, mode="silent", clock=clock) as progress:
        progress.status("compiling")
        clock.now += 60
        progress.update(10)  # of the minute nobody knows how much was the compilation
        assert progress.rate is None
        assert progress.parts() == ["1%", "10/1k steps"]
        clock.now += 1
        progress.update(110)
        assert progress.rate == pytest.approx(100)
        # A status that comes after the steps takes nothing from what is known.
        progress.status("evaluating")
        clock.now += 30
        progress.update(110)
        assert progress.rate == pytest.approx(100)


def test_steps_before_the_work_are_said_to_be_others_only_after_a_resume():
    clock = Clock()
    for resumed, said in ((False, "x: 100 steps in"), (True, "x: 100 steps (60 of them now) in")):
        with Progress(100, description="x", mode="silent", clock=clock) as progress:
            progress.status("compiling")
            clock.now += 60
            progress.begin(40, resumed=resumed)
            assert progress.current_status is None
            clock.now += 1
            progress.update(100)
            assert progress.rate == pytest.approx(60)
            assert progress.final_line().startswith(said)


def test_time_left_counts_down_between_rare_updates():
    clock = Clock()
    with Progress(1000, mode="silent", clock=clock) as progress:
        for step in (100, 200):
            clock.now += 10
            progress.update(step)
        assert "1:20 left" in progress.parts()
        clock.now += 7
        assert "1:13 left" in progress.parts()


def test_speed_follows_the_last_seconds():
    clock = Clock()
    with Progress(100_000, mode="silent", clock=clock) as progress:
        step = 0
        for speed in (10, 1000):
            for _ in range(500):
                clock.now += 0.1
                step += speed / 10
                progress.update(int(step))
        assert progress.rate == pytest.approx(1000, rel=0.02)


def test_speed_of_a_slow_first_moment_fades_at_once():
    clock = Clock()
    with Progress(100_000, mode="silent", clock=clock) as progress:
        for done in (10, 1000, 1000):
            clock.now += 0.1
            progress.update(progress.step + done)
        assert progress.rate == pytest.approx(2010 / 0.3, rel=0.01)


def test_no_line_says_that_nothing_was_done_yet():
    clock, file = Clock(), io.StringIO()
    with Progress(100, description="x", mode="lines", file=file, clock=clock) as progress:
        progress.status("compiling")
        clock.now += 60
        progress.begin(0)
        clock.now += 1
        progress.update(100)
    lines = file.getvalue().splitlines()
    assert len(lines) == 3  # compiling, this, the final one
    assert lines[1] == "x: 100%  0:00 left  100 steps/s  100/100 steps"


def test_numbers_of_seeds_show_mean_and_spread_and_missing_ones_keep_the_last():
    progress = Progress(10, mode="silent")
    progress.update(1, episode_return=np.array([1.0, 3.0, np.nan]), loss=0.5)
    progress.update(2, episode_return=None, loss=float("nan"), eval_episode_return=np.float32(7))
    want = {"return": "2.00 ± 1.00", "loss": "0.500", "eval return": "7.00"}
    assert progress.numbers == want
    progress.update(3, loss=np.inf)
    assert progress.numbers["loss"] == "inf"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_lines_are_written_in_the_encoding_of_the_file(encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    with Progress(10, mode="lines", file=file) as progress:
        progress.status("compiling")
        progress.message("λ ≥ 1 …")
        progress.update(10, episode_return=[480.0, 500.0])
    file.seek(0)
    status, message, final = file.read().splitlines()
    assert status == "compiling ..."
    assert message == "lambda >= 1 ..."
    plus_minus = {"ascii": "+/-", "latin-1": "±"}[encoding]
    assert final.endswith(f"return 490.0 {plus_minus} 10.0")


def test_no_stderr_is_silent(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    for mode in ("auto", "bar", "lines"):
        with Progress(10, mode=mode) as progress:
            progress.update(10)
            progress.message("unseen")


def test_closed_file_does_not_fail_the_run():
    file, clock = io.StringIO(), Clock()
    with Progress(10, mode="lines", file=file, clock=clock) as progress:
        file.close()
        clock.now += 100
        progress.update(10)
        progress.message("lost")


def test_errors_name_the_rule():
    with pytest.raises(ValueError, match="mode must be one of"):
        Progress(10, mode="bars")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least 0"):
        Progress(-1)


def test_bar_in_a_notebook_leaves_a_plain_line_in_the_saved_file():
    import nbclient
    import nbformat

    run = """
import threading
from IPython import get_ipython
from jaxroll.train import History, Progress
seen = []
enough = threading.Event()
class Watch(type(get_ipython().display_pub)):
    def publish(self, data, *args, **kwargs):
        seen.append(data)
        if "text/html" in data and "compiling 0:0" in data["text/html"]:
            enough.set()
        super().publish(data, *args, **kwargs)
get_ipython().display_pub.__class__ = Watch
with Progress(100, description="demo <b>") as progress:
    progress.status("compiling")
    assert enough.wait(30), seen  # drawn by its own thread
    progress.update(100, episode_return=500.0)
"""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(run),
        nbformat.v4.new_code_cell("seen[0]['text/html'], len(seen)"),
        nbformat.v4.new_code_cell("History([{'step': 1, 'x': 2.0}, {'step': 2, 'x': 3.0}]).plot()"),
    ]
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    (bar,) = notebook.cells[0].outputs
    assert set(bar["data"]) == {"text/plain"}
    assert re.fullmatch(
        r"demo <b>: 100 steps in 0.0 s, compiling \S+ s, return 500.0", bar["data"]["text/plain"]
    )
    first = notebook.cells[1].outputs[0]["data"]["text/plain"]
    assert "<progress" in first
    assert "demo &lt;b&gt;" in first
    assert "image/png" in notebook.cells[2].outputs[0]["data"]
