"""Actions on their way to a host environment: checked before they are handed over.

Simulators written in C accept wrong lengths and dtypes silently, and read past the end or play
another action. So shape, dtype and range are checked here, for every source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jaxroll import spaces
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
    if out_of_range not in ("error", "clip"):
        raise ValueError(f'out_of_range must be "error" or "clip", got {out_of_range!r}.')
    if isinstance(space, spaces.Dict):
        parts = {k: action_checker(s, num_envs, out_of_range) for k, s in space.items}

        def check_dict(actions: PyTree) -> PyTree:
            if not isinstance(actions, dict) or actions.keys() != parts.keys():
                raise ValueError(f"actions must be a dict with the keys {sorted(parts)}.")
            return {name: check(actions[name]) for name, check in parts.items()}

        return check_dict

    shape = (num_envs, *space.shape)

    def shaped(actions: Any, kinds: str, wanted: str) -> np.ndarray:
        actions = np.asarray(actions)
        if actions.shape != shape:
            raise ValueError(
                f"actions must have shape {shape}, one for each environment, got {actions.shape}."
            )
        if actions.dtype.kind not in kinds:
            raise TypeError(f"actions must be {wanted} for {space}, got {actions.dtype}.")
        return actions

    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        return _box_checker(space, shaped, out_of_range)

    if isinstance(space, spaces.Box):
        low, high = (bound.astype(np.int64) for bound in space.bounds())
    else:
        sizes = {
            spaces.Discrete: lambda: np.int64(space.n),  # pyright: ignore[reportAttributeAccessIssue]
            spaces.MultiDiscrete: lambda: np.asarray(space.nvec),  # pyright: ignore[reportAttributeAccessIssue]
            spaces.MultiBinary: lambda: np.int64(2),
        }
        low, high = np.int64(0), sizes[type(space)]() - 1
    kinds = "iub" if isinstance(space, spaces.MultiBinary) else "iu"

    is_choice = isinstance(space, spaces.Discrete)

    def check_integers(actions: PyTree) -> np.ndarray:
        actions = shaped(actions, kinds, "integers")
        if is_choice and actions.min() >= 0 and actions.max() <= high:
            return actions  # the common case, in two passes
        outside = (actions < low) | (actions > high)
        if outside.any():
            raise ValueError(_range_message(actions, outside, low, high))
        return actions

    return check_integers


def _box_checker(
    space: spaces.Box, shaped: Callable[..., np.ndarray], out_of_range: OutOfRange
) -> Callable[[PyTree], np.ndarray]:
    low, high = (bound.astype(space.dtype) for bound in space.bounds())
    with np.errstate(over="ignore", invalid="ignore"):
        slack = np.where(np.isfinite(high - low), 1e-6 * (high - low), 0).astype(space.dtype)
    clip = out_of_range == "clip"

    def check_box(actions: PyTree) -> np.ndarray:
        actions = shaped(actions, "f", "floats")
        if not np.isfinite(actions).all():
            env = int(np.argwhere(~np.isfinite(actions))[0][0])
            raise ValueError(
                f"actions must be finite, got {actions[env]} for environment {env}: the policy's "
                "parameters or the observations are no longer finite."
            )
        inside = np.clip(actions, low, high)
        if not clip:
            outside = np.abs(actions - inside) > slack
            if outside.any():
                raise ValueError(
                    _range_message(actions, outside, low, high)
                    + " Squash them in the policy, or clip on the way: make_env(…, "
                    'out_of_range="clip").'
                )
        return inside

    return check_box


def _range_message(actions: np.ndarray, outside: np.ndarray, low: Any, high: Any) -> str:
    where = tuple(np.argwhere(outside)[0])
    low, high = (np.broadcast_to(bound, actions.shape)[where] for bound in (low, high))
    return (
        f"actions must lie in {low} … {high}, got {actions[where]} for environment {where[0]}"
        + (f", entry {tuple(int(i) for i in where[1:])}." if len(where) > 1 else ".")
    )
