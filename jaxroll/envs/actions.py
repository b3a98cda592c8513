"""Actions for a host environment, checked before they are handed over.

Simulators written in C accept wrong lengths and dtypes silently, and read past the end or play
another action. So shape, dtype and range are checked here, for every source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jaxroll import spaces
from jaxroll.checks import check_choice
from jaxroll.types import PyTree

OutOfRange = Literal["error", "clip"]


def action_checker(
    space: spaces.Space, num_envs: int, out_of_range: OutOfRange = "clip"
) -> Callable[[PyTree], PyTree]:
    """A function from actions, [B, ...], to the same actions in numpy, or an error.

    Args:
      space: of one environment's action.
      num_envs: B.
      out_of_range: what to do with a `Box` action past its bounds: "clip" hands over the
        nearest bound (a Gaussian policy has no bounds, and its own action is what is stored),
        "error" allows for rounding only, a millionth of the range.

    Example:
      >>> action_checker(spaces.Discrete(2), 3)(np.array([0, 1, 2]))
      Traceback (most recent call last):
        ...
      ValueError: actions must lie in 0 … 1, got 2 for environment 2.
    """
    check_choice("out_of_range", out_of_range, ("error", "clip"))
    if isinstance(space, spaces.Dict):
        parts = {k: action_checker(s, num_envs, out_of_range) for k, s in space.items}

        def check_dict(actions: PyTree) -> PyTree:
            if not isinstance(actions, dict) or actions.keys() != parts.keys():
                raise ValueError(f"actions must be a dict with the keys {sorted(parts)}.")
            return {name: check(actions[name]) for name, check in parts.items()}

        return check_dict

    shape = (num_envs, *space.shape)
    is_float = np.dtype(space.dtype).kind == "f"
    kinds = "f" if is_float else "iub" if isinstance(space, spaces.MultiBinary) else "iu"
    low, high = action_bounds(space)
    with np.errstate(over="ignore", invalid="ignore"):
        slack = np.where(np.isfinite(high - low), 1e-6 * (high - low), 0) if is_float else 0

    def check(actions: PyTree) -> np.ndarray:
        actions = np.asarray(actions)
        if actions.shape != shape:
            raise ValueError(
                f"actions must have shape {shape}, one for each environment, got {actions.shape}."
            )
        if actions.dtype.kind not in kinds:
            wanted = "floats" if is_float else "integers"
            raise TypeError(f"actions must be {wanted} for {space}, got {actions.dtype}.")
        if is_float and not np.isfinite(actions).all():
            env = int(np.argwhere(~np.isfinite(actions))[0][0])
            raise ValueError(
                f"actions must be finite, got {actions[env]} for environment {env}: the policy's "
                "parameters or the observations are no longer finite."
            )
        if (actions >= low).all() and (actions <= high).all():
            return actions
        inside = np.clip(actions, low, high)
        outside = np.abs(actions - inside) > slack
        if outside.any() and (out_of_range == "error" or not is_float):
            raise ValueError(_range_message(actions, outside, low, high, is_float))
        return inside

    return check


def action_bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """(lowest, highest) action of a space that is not a Dict, of a shape that broadcasts."""
    if isinstance(space, spaces.Box):
        low, high = space.bounds()
        return low.astype(space.dtype), high.astype(space.dtype)
    size = 2 if isinstance(space, spaces.MultiBinary) else getattr(space, "nvec", None) or space.n
    return np.asarray(0), np.asarray(size) - 1


def _range_message(
    actions: np.ndarray, outside: np.ndarray, low: Any, high: Any, can_clip: bool
) -> str:
    where: tuple[int, ...] = tuple(np.argwhere(outside)[0].tolist())
    env, *rest = where
    low, high = (np.broadcast_to(bound, actions.shape)[where] for bound in (low, high))
    entry = f", entry {tuple(rest)}" if rest else ""
    message = (
        f"actions must lie in {low} … {high}, got {actions[where]} for environment {env}{entry}."
    )
    if can_clip:
        message += ' Squash them in the policy, or use make_env(…, out_of_range="clip").'
    return message
