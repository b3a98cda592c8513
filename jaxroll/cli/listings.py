"""`jaxroll envs` and `jaxroll agents`: what there is."""

from __future__ import annotations

import argparse
import textwrap

from jaxroll.checks import near_matches
from jaxroll.cli.parser import UsageError


def agents_command(args: argparse.Namespace) -> int:
    """Every agent, or the hyperparameters of one."""
    from jaxroll.agents import AGENTS

    if args.name is None:
        for name, cls in AGENTS.items():
            print(f"{name:<8} {(cls.__doc__ or '').strip().splitlines()[0]}")
        print("\njaxroll agents NAME lists the hyperparameters of one.")
        return 0
    if args.name not in AGENTS:
        raise UsageError(f"unknown agent {args.name!r}. {near_matches(args.name, AGENTS)}")
    cls = AGENTS[args.name]
    print(f"{args.name}: {(cls.__doc__ or '').strip().splitlines()[0]}\n")
    rows = []
    for h in cls.hyperparameters().values():
        default = "none" if h.default is None else str(h.default)
        rule = h.rule or ", ".join("none" if c is None else str(c) for c in h.choices)
        note = f"{h.help} [{rule}]" if rule else h.help
        rows.append((h.name, default, note + ("" if h.is_static else " *")))
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    indent = sum(widths) + 6
    for name, default, note in rows:
        head = f"  {name:<{widths[0]}}  {default:<{widths[1]}}  "
        print(textwrap.fill(head + note, 100, subsequent_indent=" " * indent))
    print("\n* can be changed and swept without compiling anew. Set one: --set NAME=VALUE.")
    return 0


def envs_command(args: argparse.Namespace) -> int:
    """Every environment that can be made, one name a line."""
    from jaxroll.envs import list_envs

    names = list_envs(args.source)
    for name in names:
        print(name)
    if not names:
        raise UsageError(
            f'{args.source} is not installed. Install it: pip install "jaxroll[{args.source}]".'
        )
    return 0
