"""How things are timed: side by side, in one process, and never the compiler.

Contenders of one row take turns, in an order that changes from round to round, so that whatever
else the machine does falls on all of them. A ratio is the median over the rounds of the quotient
within one round, with its quartiles; times are medians with theirs. The first call, which compiles,
is kept apart.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PyTree = Any
Run = Callable[[], Any]  # does the work once; what it returns is waited for


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
      seconds: what one row may take, compilation not counted.
      rounds: at least this many turns of each contender, whatever they take.
      most_rounds: at most this many.
      quick: tiny sizes, to see that everything runs.
      full: the long rows too.
      baseline: another checkout of jaxroll, for the section `versions`.
      clock: "wall", or "cpu" for the process's time on all cores: on a machine that others use, it
        says more about the work, and nothing about how well cores are kept busy.
    """

    seconds: float = 2.0
    rounds: int = 7
    most_rounds: int = 60
    quick: bool = False
    full: bool = False
    baseline: str | None = None
    clock: str = "wall"

    @classmethod
    def create(cls, *, quick: bool = False, full: bool = False, **more: Any) -> Settings:
        """Those of `--quick`, of `--full`, or the usual ones."""
        if quick:
            return cls(seconds=0.02, rounds=2, most_rounds=2, quick=True, **more)
        if full:
            return cls(seconds=10.0, rounds=15, most_rounds=200, full=True, **more)
        return cls(**more)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of these values."""
        low, median, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A quotient of two contenders' times, and what it should be.

    Attributes:
      over: the contender whose time is above the line.
      under: the one below: over / under > 1 says that `under` is faster.
      at_least: the target, if it is a lower bound.
      at_most: the target, if it is an upper one.
    """

    over: str
    under: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def label(self) -> str:
        """How it is called in the table."""
        return f"{self.over} / {self.under}"

    @property
    def target(self) -> str:
        """The target as text; empty without one."""
        parts = []
        if self.at_least is not None:
            parts.append(f"≥ {self.at_least:g}")
        if self.at_most is not None:
            parts.append(f"≤ {self.at_most:g}")
        return ", ".join(parts)

    def met(self, value: float) -> bool | None:
        """Whether a value is within the target; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        low = self.at_least is None or value >= self.at_least
        return low and (self.at_most is None or value <= self.at_most)


@dataclasses.dataclass
class Row:
    """One comparison; `as_json` is what the results file holds."""

    section: str
    case: str
    times: dict[str, Spread] = dataclasses.field(default_factory=dict)  # seconds
    first_calls: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds
    ratios: list[tuple[Ratio, Spread]] = dataclasses.field(default_factory=list)
    rounds: int = 0
    steps: int | None = None  # environment steps of one run, for steps per second
    temporary_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)  # instead of times
    notes: list[str] = dataclasses.field(default_factory=list)
    measured: str = ""  # when and on what

    def add_count_ratio(self, over: str, under: str, at_least: float | None = None) -> None:
        """A quotient of two counts, which has no spread."""
        value = self.counts[over] / self.counts[under]
        self.ratios.append((Ratio(over, under, at_least), Spread(value, value, value)))

    def as_json(self) -> dict[str, Any]:
        """Plain dicts and numbers."""
        result = dataclasses.asdict(self)
        result["ratios"] = [
            {
                "ratio": ratio.label,
                **dataclasses.asdict(spread),
                "target": ratio.target,
                "met": ratio.met(spread.median),
            }
            for ratio, spread in self.ratios
        ]
        return result

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """The row that `as_json` described; how one comes back from another process."""
        ratios = []
        for entry in data["ratios"]:
            over, under = entry["ratio"].split(" / ", 1)
            bounds = {}
            for part in filter(None, entry["target"].split(", ")):
                sign, number = part.split()
                bounds["at_least" if sign == "≥" else "at_most"] = float(number)
            spread = Spread(entry["median"], entry["low"], entry["high"])
            ratios.append((Ratio(over, under, **bounds), spread))
        times = {name: Spread(**spread) for name, spread in data["times"].items()}
        return cls(**{**data, "ratios": ratios, "times": times})


def measure(
    section: str,
    case: str,
    contenders: dict[str, Run],
    ratios: Sequence[Ratio],
    settings: Settings,
    *,
    steps: int | None = None,
    per_call: dict[str, float] | None = None,
    notes: Sequence[str] = (),
) -> Row:
    """Time the contenders in turn.

    Args:
      section: the row's section.
      case: what this row is about, such as a shape.
      contenders: by name; each does its work once when called.
      ratios: which quotients to take; those with a contender that is not there are left out.
      settings: how long.
      steps: environment steps that one run takes, if it does.
      per_call: how often a run does the work, by contender; times are divided by it.
      notes: shown below the table.
    """
    row = Row(section, case, steps=steps, notes=list(notes))
    for name, run in contenders.items():
        row.first_calls[name] = seconds(run, settings)
    for run in contenders.values():  # once more: caches, lazy initialisation
        seconds(run, settings)
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    while True:
        done = row.rounds
        if done >= settings.most_rounds:
            break
        if done >= settings.rounds and time.perf_counter() - start > settings.seconds:
            break
        shift = done % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(seconds(contenders[name], settings) / (per_call or {}).get(name, 1))
        row.rounds += 1
    row.times = {name: Spread.of(values) for name, values in times.items()}
    for ratio in ratios:
        if ratio.over in times and ratio.under in times:
            row.ratios.append((ratio, quotients(times, ratio)))
    return row


def quotients(times: dict[str, list[float]], ratio: Ratio) -> Spread:
    """The spread of a ratio over the rounds."""
    return Spread.of([a / b for a, b in zip(times[ratio.over], times[ratio.under])])


def seconds(run: Run, settings: Settings) -> float:
    """How long one run takes, waited for, by the settings' clock."""
    clock = time.process_time if settings.clock == "cpu" else time.perf_counter
    start = clock()
    jax.block_until_ready(run())
    return clock() - start


def measure_kernels(
    section: str,
    case: str,
    functions: dict[str, Callable[..., PyTree]],
    inputs: tuple[PyTree, ...],
    ratios: Sequence[Ratio],
    settings: Settings,
    *,
    notes: Sequence[str] = (),
) -> Row:
    """Time small functions, many calls inside one program, so that no dispatch is timed.

    Args:
      section: the row's section.
      case: what this row is about.
      functions: by name; each of `inputs`.
      inputs: arrays.
      ratios: which quotients to take.
      settings: how long.
      notes: shown below the table.
    """
    programs = {name: repeated(function, *inputs) for name, function in functions.items()}
    counts = {}
    for name, program in programs.items():
        jax.block_until_ready(program(1))
        once = min(seconds(lambda p=program: p(8), settings) for _ in range(2)) / 8
        counts[name] = 1 if settings.quick else max(1, round(0.006 / max(once, 1e-7)))
    runs = {
        name: (lambda program=program, count=counts[name]: program(count))
        for name, program in programs.items()
    }
    return measure(section, case, runs, ratios, settings, per_call=counts, notes=notes)


def repeated(function: Callable[..., PyTree], *inputs: PyTree) -> Callable[[int], PyTree]:
    """A program that calls `function(*inputs)` a number of times; the number is data.

    A barrier ties the inputs of each call to the call before, so that the compiler can neither
    take work out of the loop nor leave a call out.
    """
    shapes = jax.eval_shape(function, *inputs)

    @jax.jit
    def program(count: Any, inputs: tuple[PyTree, ...]) -> PyTree:
        def body(_: Any, carry: tuple[Any, PyTree]) -> tuple[Any, PyTree]:
            tie, _ = carry
            tied, tie = lax.optimization_barrier((inputs, tie))
            return tie + 1, function(*tied)

        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, count, body, (jnp.zeros((), jnp.int32), start))

    inputs = jax.block_until_ready(jax.tree.map(jnp.asarray, inputs))
    return lambda count: program(jnp.asarray(count, jnp.int32), inputs)


def check_agreement(functions: dict[str, Callable[..., PyTree]], inputs: tuple, names: Any) -> None:
    """Raise if contenders that should compute the same do not: a fast wrong answer is no win."""
    results = {name: jax.jit(functions[name])(*inputs) for name in names if name in functions}
    first, *others = results
    for other in others:
        for a, b in zip(jax.tree.leaves(results[first]), jax.tree.leaves(results[other])):
            difference = float(jnp.max(jnp.abs(a - b) / (1 + jnp.abs(a))))
            if not difference < 1e-3:
                raise AssertionError(f"{first} and {other} differ by {difference:g}.")
