"""Checks of arguments: one function for each kind, with errors that name rule, value and way out.

Each returns the argument in the form in which it is stored. They look at concrete values only: a
traced number passes, since its value is not known. jax and numpy load in the checks that need
them, so that the command line can check its words without.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

RULES = {
    "> 0": lambda x: x > 0,
    ">= 0": lambda x: x >= 0,
    ">= 1": lambda x: x >= 1,
    "in [0, 1]": lambda x: (x >= 0) & (x <= 1),
}

# What options of other libraries are called here, to say so in an error.
RENAMED = {
    "clip_range": "clip_epsilon",
    "device": 'JAX_PLATFORMS in the environment ("cpu", "cuda", "tpu"), or mesh=, devices=',
    "ent_coef": "entropy_coef",
    "eps": "adam_epsilon (IMPALA: rmsprop_epsilon)",
    "gamma": "discount",
    "hidden_dim": "hidden_sizes=(256, 256)",
    "lr": "learning_rate",
    "n_epochs": "num_epochs",
    "size": "num_steps (of a ring: num_storages)",
    "tag": "checkpoint_dir= (of a config: out)",
    "use_lstm": 'network="lstm"',
    "vf_coef": "value_coef",
}


def check_count(name: str, value: Any, *, at_least: int = 1, below: int = 2**31) -> int:
    """A size or a number of things: an integer in [at_least, below).

    Example:
      >>> check_count("num_steps", 0)
      Traceback (most recent call last):
        ...
      ValueError: num_steps must be at least 1, got 0.
    """
    number = _as_integer(name, value)
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}.")
    if number >= below:
        raise ValueError(f"{name} must be below 2**{below.bit_length() - 1}, got {number}.")
    return number


def check_seed(name: str, value: Any) -> int:
    """A seed: an integer in [0, 2**32); beyond it, keys would repeat."""
    number = _as_integer(name, value)
    if not 0 <= number < 2**32:
        raise ValueError(f"{name} must be in [0, 2**32), got {number}.")
    return number


def check_number(
    name: str,
    value: Any,
    rule: str | None = None,
    *,
    finite: bool = True,
    shape: tuple[int, ...] | None = (),
) -> Any:
    """A real number that enters a formula, or an array of them; returned unchanged.

    Args:
      name: how to call it in an error.
      value: a Python or numpy number, an array or a tracer.
      rule: one of "> 0", ">= 0", ">= 1", "in [0, 1]"; None: any number.
      finite: whether infinity is refused. NaN always is.
      shape: that the value must have; None: any.

    Example:
      >>> check_number("discount", 1.5, "in [0, 1]")
      Traceback (most recent call last):
        ...
      ValueError: discount must be in [0, 1], got 1.5.
    """
    import jax
    import jax.core
    import numpy as np

    is_array = isinstance(value, np.ndarray | np.generic | jax.Array | jax.core.Tracer)
    if isinstance(value, bool) or not (is_array or isinstance(value, int | float)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if np.dtype(getattr(value, "dtype", type(value))).kind not in "fiuV":
        raise TypeError(f"{name} must be a real number, got {value!r}.")
    if shape is not None and np.shape(value) != shape:
        wanted = "a single number" if shape == () else f"of shape {list(shape)}"
        raise ValueError(f"{name} must be {wanted}, got shape {list(np.shape(value))}.")
    if isinstance(value, jax.core.Tracer):
        return value
    numbers = np.asarray(value, np.float64)
    shown = numbers.item() if numbers.ndim == 0 else numbers.tolist()
    if np.isnan(numbers).any():
        raise ValueError(f"{name} must be a number, got {shown}.")
    if rule is not None and not RULES[rule](numbers).all():
        raise ValueError(f"{name} must be {rule}, got {shown}.")
    if finite and np.isinf(numbers).any():
        raise ValueError(f"{name} must be finite, got {shown}.")
    return value


def check_flag(name: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as one."""
    if isinstance(value, bool):
        return value
    import numpy as np

    if not isinstance(value, np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """One of a few values.

    Example:
      >>> check_choice("reduction", "fats", ("fast", "exact"))
      Traceback (most recent call last):
        ...
      ValueError: reduction must be one of 'fast', 'exact', got 'fats'. Did you mean 'fast'?
    """
    if not any(type(value) is type(c) and value == c for c in choices):
        shown = ", ".join(repr(c) for c in choices)
        hint = did_you_mean(value, choices)
        raise ValueError(f"{name} must be one of {shown}, got {value!r}.{hint}")
    return value


def check_path(name: str, value: Any) -> Path:
    """A path on this machine; an address such as gs://… is refused."""
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise TypeError(f"{name} must be a path, got {value!r}.")
    text = os.fspath(value)
    if isinstance(text, bytes):
        raise TypeError(f"{name} must be a path as text, got {value!r}.")
    # A Path has already folded "gs://bucket" into "gs:/bucket".
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise ValueError(
            f"{name} must be a path on this machine, got {text!r}: remote directories are not "
            "supported. Use a local path, or a mounted one."
        )
    if "\0" in text:
        raise ValueError(f"{name} must be a path, got {text!r}.")
    return Path(text)


def check_key(name: str, value: Any) -> jax.Array:
    """A single typed PRNG key, as `jax.random.key` makes it."""
    import jax
    import jax.numpy as jnp

    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} must be a key, got {value!r}. Use jax.random.key(seed).")
    if value.ndim:
        raise ValueError(
            f"{name} must be a single key, got an array of {list(value.shape)}. Use {name}[0]."
        )
    return value


def check_array(name: str, value: Any, shape: Sequence[int] | None = None, why: str = "") -> Any:
    """An array of real numbers or flags (or what numpy makes one of); returned as an array.

    Args:
      name: how to call it in an error.
      value: anything.
      shape: that the array must have; None: any.
      why: what the shape follows from, as in " of rewards".
    """
    import jax
    import jax.core
    import jax.numpy as jnp
    import numpy as np

    if isinstance(value, jax.Array | jax.core.Tracer | jax.ShapeDtypeStruct):
        array = value
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{name} must be an array, got {value!r}: {error}") from None
    is_extended = jnp.issubdtype(array.dtype, jax.dtypes.extended)
    # Kind V: bfloat16 and other dtypes that JAX adds to numpy's.
    if not is_extended and np.dtype(array.dtype).kind not in "fiubV":
        raise TypeError(
            f"{name} must be an array of real numbers or flags, got {array.dtype}: {value!r}."
        )
    if shape is not None and array.shape != tuple(shape):
        raise ValueError(f"{name} must have the shape {list(shape)}{why}, got {list(array.shape)}.")
    return array


def check_arrays(name: str, tree: Any) -> Any:
    """A pytree of arrays of real numbers, flags or keys; returned unchanged."""
    import jax

    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        check_array(f"{name}{jax.tree_util.keystr(path)}", leaf)
    return tree


def check_kind(name: str, value: Any, kind: type, maker: str) -> Any:
    """An instance of a class of ours; `maker` says where to get one."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r}. Use {maker}.")
    return value


def check_sizes(name: str, value: Any) -> tuple[int, ...]:
    """One or more counts, such as (64, 64)."""
    if not isinstance(value, tuple | list) or not value:
        raise ValueError(f"{name} must be one or more integers, such as (64, 64), got {value!r}.")
    return tuple(check_count(f"{name}[{i}]", n) for i, n in enumerate(value))


def check_dtype(name: str, value: Any, choices: Sequence[str]) -> str:
    """The name of a dtype, one of a few, from itself or its name."""
    import numpy as np

    try:
        found = "" if value is None else np.dtype(value).name
    except (TypeError, ValueError):
        found = ""
    if found not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
    return found


def check_divides(name: str, value: Any, total: int, what: str) -> int:
    """A count that divides the total, called `what` in the error.

    Example:
      >>> check_divides("num_mini_batch", 7, 32 * 8, "num_steps * num_envs = 32 * 8")
      Traceback (most recent call last):
        ...
      ValueError: num_mini_batch must divide num_steps * num_envs = 32 * 8 = 256, got 7. Use 8.
    """
    number = check_count(name, value)
    if total % number:
        near = min(divisors(total), key=lambda n: abs(n - number))
        raise ValueError(f"{name} must divide {what} = {total}, got {number}. Use {near}.")
    return number


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def did_you_mean(name: Any, known: Iterable[Any]) -> str:
    """A hint for the end of an error, " Did you mean 'x'?", or nothing.

    Example:
      >>> did_you_mean("discuont", ["discount", "gae_lambda"])
      " Did you mean 'discount'?"
      >>> did_you_mean("lr", ["learning_rate"])
      ' It is called learning_rate here.'
    """
    if isinstance(name, str) and name in RENAMED:
        return f" It is called {RENAMED[name]} here."
    spelled = {str(k).lower(): k for k in known}
    near = difflib.get_close_matches(str(name).lower(), spelled, n=1)
    return f" Did you mean {spelled[near[0]]!r}?" if near else ""


def near_matches(name: str, known: Iterable[str]) -> str:
    """The end of an error message: which name was meant, or which there are.

    Example:
      >>> near_matches("trian", ["train", "eval"]), near_matches("x", ["train", "eval"])
      ("Did you mean 'train'?", 'There are: train, eval.')
    """
    known = list(known)
    return did_you_mean(name, known).strip() or f"There are: {', '.join(known) or 'none'}."


def unknown_name(kind: str, name: str, known: Iterable[str], where: str) -> str:
    """The text of an error for a name that does not exist, with the nearest that does."""
    known = list(known)
    return (
        f"{where} has no {kind} {name!r}; it has {', '.join(known) or 'none'}."
        f"{did_you_mean(name, known)}"
    )


def _as_integer(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    import jax
    import jax.core
    import numpy as np

    is_whole = isinstance(value, np.integer)
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer):
        is_whole = value.shape == () and jax.numpy.issubdtype(value.dtype, np.integer)
    if not is_whole and not (isinstance(value, float) and value.is_integer()):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    return int(value)
