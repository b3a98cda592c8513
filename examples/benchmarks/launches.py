"""How many kernels an accelerator would start for one PPO update, counted without one.

The program is lowered for a GPU or a TPU and fused by the CPU's XLA. Its instructions are counted,
those of a loop times its trip count. An accelerator fuses differently, so this is a proxy for
launches, useful as a ratio between two programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import purejaxrl
from harness import Row, Settings
from jaxlib import xla_client

import jaxroll

# Instructions that name data and start nothing.
FREE = {"parameter", "get-tuple-element", "tuple", "constant", "bitcast", "after-all"}


def launches(settings: Settings) -> list[Row]:
    """PPO's update on CartPole beside the purejaxrl form."""
    rows = []
    for num_envs in (8,) if settings.quick else (64, 2048, 32768):
        config = {**purejaxrl.CARTPOLE, "num_envs": num_envs}
        agent = jaxroll.PPO.create("CartPole-v1", **config)
        init, update = purejaxrl.make_update("CartPole-v1", config)
        programs: dict[str, Any] = {
            "jaxroll": (agent.init, agent.train_step),
            "purejaxrl form": (init, lambda runner, update=update: update(runner, None)),
        }
        for platform in ("cuda", "tpu"):
            row = Row("launches", f"PPO, CartPole, {num_envs} envs, {platform}", rounds=1)
            for name, (start, step) in programs.items():
                state = jax.eval_shape(start, jax.random.key(0))
                row.counts[name] = count_launches(step, state, platform=platform)
            row.add_count_ratio("purejaxrl form", "jaxroll", at_least=1.6)
            rows.append(row)
    return rows


def count_launches(function: Callable[..., Any], *shapes: Any, platform: str) -> int:
    """Instructions of a function lowered for a platform, after fusion, loops by their trips."""
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))
    device = jax.devices("cpu")[0]
    # A GPU's own kernels are unknown to the CPU's compiler: keys are drawn as on a TPU.
    program = device.client.compile_and_load(
        lowered.compiler_ir("stablehlo"),
        xla_client.DeviceList((device,)),
        xla_client.CompileOptions(),
    )
    return count_instructions(program.hlo_modules()[0].to_string())


def count_instructions(hlo: str) -> int:
    """Instructions of an HLO module's text that do work, each as often as it runs.

    A loop whose trip count the compiler does not know raises ValueError; of a branch the longest
    side counts.
    """
    computations: dict[str, list[str]] = {}
    name = entry = ""
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[2]
            computations[name] = []
            entry = name if head[1] else entry
        elif line.startswith("  ") and " = " in line:
            computations[name].append(line.strip())

    def count(name: str) -> int:
        return sum(cost(line) for line in computations[name])

    def cost(line: str) -> int:
        found = re.match(r"(?:ROOT )?\S+ = (?:\(.*?\)|\S+) ([\w\-]+)\(", line)
        kind = found[1] if found else ""
        if kind in FREE:
            return 0
        if kind == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            if trips is None:
                raise ValueError(f"a loop's trip count depends on data: {line[:200]}")
            return int(trips[1]) * count(called(line, "body"))
        if kind == "call":
            return count(called(line, "to_apply"))
        if kind == "conditional":
            return 1 + max(count(branch) for branch in branches(line))
        return 1

    return count(entry)


def called(line: str, role: str) -> str:
    """The computation that an instruction calls."""
    found = re.search(rf"{role}=%?([\w.\-]+)", line)
    assert found is not None, line
    return found[1]


def branches(line: str) -> list[str]:
    """The computations of a conditional."""
    found = re.search(r"branch_computations=\{([^}]*)\}", line)
    if found:
        return [name.strip().lstrip("%") for name in found[1].split(",")]
    return [called(line, "true_computation"), called(line, "false_computation")]
