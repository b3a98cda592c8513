"""Spaces, observations and actions of other libraries as ours, and back.

Observations arrive as float32 where they were float64, integers as int32. Simulators written in C
accept actions of wrong lengths and dtypes silently, and read past the end or play another action:
so shape, dtype and range are checked here, for every source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jaxroll import spaces
from jaxroll.checks import check_choice
from jaxroll.types import PyTree

OutOfRange = Literal["error", "clip"]
_NARROW = {np.dtype("float64"): np.float32, np.dtype("int64"): np.int32}


def narrow(dtype: Any) -> np.dtype:
    """The dtype in which jaxroll keeps data of this one."""
    return np.dtype(_NARROW.get(np.dtype(dtype), dtype))


def to_space(space: Any, example: PyTree = None) -> spaces.Space:
    """A space of Gymnasium, or gymnax, as ours; a Tuple becomes a Dict with the keys "0" to "n".

    Args:
      space: known by the name of its class, since other packages bring their own copies.
      example: a member, which corrects what a Box says of shape and dtype; None: it is right.

    Example:
      >>> import gymnasium
      >>> to_space(gymnasium.spaces.Discrete(3, start=-1))
      Discrete(n=3, dtype=dtype('int32'))
    """
    kind = type(space).__name__
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(tuple(np.asarray(space.nvec).ravel()))
    if kind == "MultiBinary":
        return spaces.MultiBinary(int(np.prod(space.shape)))
    if kind == "Box":
        like = space if example is None else example
        return spaces.Box(space.low, space.high, like.shape, narrow(like.dtype))
    if kind in ("Dict", "Tuple"):
        parts = example or {}
        return spaces.Dict({str(k): to_space(v, parts.get(k)) for k, v in _children(space)})
    raise TypeError(
        f"The space {space} has no translation to arrays of a fixed shape. Wrap the environment "
        "so that it shows a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple space."
    )


def reader(space: Any) -> Callable[[Any], PyTree]:
    """A function that brings observations of a space, with any leading axes, into our form."""
    if hasattr(space, "spaces"):
        parts = sorted((str(k), k, reader(child)) for k, child in _children(space))
        return lambda obs: {name: read(obs[k]) for name, k, read in parts}
    dtype, start, num_axes = narrow(space.dtype), _start(space), len(space.shape)
    shape = spaces.zeros(to_space(space)).shape
    is_reshaped = shape != space.shape

    def read(obs: Any) -> np.ndarray:
        obs = np.asarray(obs)
        if start is not None:
            obs = obs - start
        obs = obs.astype(dtype, copy=False)
        return obs.reshape(*obs.shape[: obs.ndim - num_axes], *shape) if is_reshaped else obs

    return read


def writer(space: Any) -> Callable[[PyTree], Any]:
    """A function from checked actions, [B, ...], to new arrays such as the source wants them."""
    if hasattr(space, "spaces"):
        parts = [(k, writer(child)) for k, child in _children(space)]
        if hasattr(space.spaces, "items"):
            return lambda actions: {k: write(actions[str(k)]) for k, write in parts}
        return lambda actions: tuple(write(actions[str(k)]) for k, write in parts)
    start, dtype, shape = _start(space), space.dtype, space.shape

    def write(actions: np.ndarray) -> np.ndarray:
        # Always a copy: an environment that clips in place must not change what is stored.
        actions = actions.astype(dtype)
        if start is not None:
            actions += start
        return actions.reshape(len(actions), *shape)

    return write


def _children(space: Any) -> list[tuple[Any, Any]]:
    """The named parts of a Dict, the numbered ones of a Tuple."""
    parts = space.spaces
    return list(parts.items() if hasattr(parts, "items") else enumerate(parts))


def _start(space: Any) -> Any:
    """Where the space's choices start to count; None: at 0, like ours."""
    start = getattr(space, "start", None)
    return start if start is not None and np.any(start) else None


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
    low, high = (np.broadcast_to(bound.astype(space.dtype), shape) for bound in space.bounds())
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
            where: tuple[int, ...] = tuple(np.argwhere(outside)[0].tolist())
            entry = f", entry {where[1:]}" if where[1:] else ""
            hint = ' Squash them in the policy, or use make_env(…, out_of_range="clip").'
            raise ValueError(
                f"actions must lie in {low[where]} … {high[where]}, got {actions[where]} for "
                f"environment {where[0]}{entry}.{hint if is_float else ''}"
            )
        return inside

    return check
