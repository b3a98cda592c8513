"""Reading programs that were lowered for a platform which this machine does not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxlib.mlir import ir

PLATFORMS = ("cuda", "tpu")


def lower(function: Callable[..., Any], *args: Any, platform: str) -> Program:
    """The program of `function` for a platform; `args` may be shapes."""
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
    return Program(lowered.compiler_ir("stablehlo"))


class Program:
    """The operations of a lowered module, those of called functions included."""

    def __init__(self, module: Any) -> None:
        self.module = module  # an operation dies with its module
        functions = [op for op in module.body.operations if op.operation.name == "func.func"]
        self._functions = {ir.StringAttr(f.attributes["sym_name"]).value: f for f in functions}

    def _walk(self, op: Any, loops: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...]]]:
        for region in op.operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    name = inner.operation.name
                    yield inner, loops
                    if name == "func.call":
                        callee = ir.FlatSymbolRefAttr(inner.attributes["callee"]).value
                        yield from self._walk(self._functions[callee], loops)
                    elif name == "stablehlo.while":
                        yield from self._walk(inner, (*loops, trips(inner)))
                    elif name not in ("stablehlo.reduce", "stablehlo.scatter", "stablehlo.sort"):
                        yield from self._walk(inner, loops)

    def operations(self) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """Each operation with the trip counts of the loops around it; -1: depends on data."""
        return self._walk(self._functions["main"], ())

    def loops(self) -> list[tuple[int, ...]]:
        """The trip counts of each loop, those around it first."""
        return sorted(
            (*around, trips(op))
            for op, around in self.operations()
            if op.operation.name == "stablehlo.while"
        )

    def body_sizes(self) -> Counter[tuple[int, ...]]:
        """How many operations run in each loop (and outside, under ()), constants apart."""
        sizes: Counter[tuple[int, ...]] = Counter()
        for op, loops in self.operations():
            sizes[loops] += op.operation.name not in ("stablehlo.constant", "stablehlo.return")
        return sizes

    def branches_on_data(self) -> list[str]:
        """Branches whose selector is computed: on a GPU the host waits for each."""
        return [
            str(op.operation.location)
            for op, _ in self.operations()
            if op.operation.name in ("stablehlo.case", "stablehlo.if")
            and len(op.operation.regions) > 1
            and not _is_constant(op.operation.operands[0])
        ]

    def wide_sorts(self) -> list[str]:
        """Sorts of 64-bit words."""
        return [
            str(op.operation.location)
            for op, _ in self.operations()
            if op.operation.name == "stablehlo.sort"
            and any("64" in str(operand.type).rpartition("x")[2] for operand in op.operands)
        ]

    def host_calls(self) -> list[str]:
        """Targets of custom calls that go back to Python."""
        targets = [
            ir.StringAttr(op.attributes["call_target_name"]).value
            for op, _ in self.operations()
            if op.operation.name == "stablehlo.custom_call"
        ]
        return [target for target in targets if "callback" in target]


def trips(loop: Any) -> int:
    """The trip count of a `while` that counts up to a constant; -1 where data decide."""
    condition = loop.operation.regions[0].blocks[0].operations
    for op in condition:
        if op.operation.name == "stablehlo.compare":
            bound = op.operands[1].owner
            if getattr(bound, "name", "") == "stablehlo.constant" and len(list(condition)) <= 3:
                return int(str(bound.attributes["value"]).partition("<")[2].partition(">")[0])
    return -1


def _is_constant(value: Any) -> bool:
    """A constant, or a `case` of constants: how a platform is chosen."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return False
    if owner.name == "stablehlo.constant":
        return True
    return owner.name == "stablehlo.case" and all(
        all(op.operation.name in ("stablehlo.constant", "stablehlo.return") for op in b.operations)
        for region in owner.regions
        for b in region.blocks
    )
