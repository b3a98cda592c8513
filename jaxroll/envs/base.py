"""The two kinds of environment, and how a user's own becomes one.

`Env` is one JAX environment: a frozen value with pure `reset` and `step` that resets itself.
Collectors `vmap` it. `HostEnv` is B environments that run on the host, outside of JAX, whatever
their way of resetting; `HostEnvSpec` is the frozen value from which they are made.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.checks import check_array
from jaxroll.spaces import Space, zeros
from jaxroll.types import Node, PyTree, TimeStep


class Env(Protocol):
    """One JAX environment: a frozen, hashable value whose methods are pure.

    Two that were made alike are equal, so that an environment can be a static argument without a
    second compilation. After an end, `TimeStep.obs` already is the first observation of the next
    episode, and `TimeStep.final_obs` the successor that it replaced. An environment that does not
    reset itself becomes one through `autoreset`.

    It may have a third method, `draw(key)`: what a step needs that depends on its key only, such as
    the start of the next episode. `step` takes the result in the key's place, so that a collector
    draws for many steps at once; see `Draws`. It may state its `time_limit`; see there.

    Example, a coin to be guessed, whose episodes are one step long:
      >>> from jaxroll import spaces
      >>> @dataclasses.dataclass(frozen=True)
      ... class Coin:
      ...     observation_space = spaces.Box.create(0, 1, (1,))
      ...     action_space = spaces.Discrete(2)
      ...
      ...     def reset(self, key):
      ...         return (), jnp.zeros(1)
      ...
      ...     def step(self, key, state, action):
      ...         reward = (jax.random.bernoulli(key) == action).astype(jnp.float32)
      ...         ended, obs = jnp.bool_(True), jnp.zeros(1)
      ...         return (), TimeStep(obs, reward, ended, ~ended, final_obs=obs)
      >>> env: Env = Coin()
      >>> state, obs = env.reset(jax.random.key(0))
      >>> env.step(jax.random.key(1), state, jnp.int32(1))[1].reward.shape
      ()
    """

    @property
    def observation_space(self) -> Space:
        """What `reset` and `step` show."""
        ...

    @property
    def action_space(self) -> Space:
        """What `step` accepts."""
        ...

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Start an episode: (state, obs)."""
        ...

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> tuple[PyTree, TimeStep]:
        """Take one step and, if it ended the episode, reset: (state, time step)."""
        ...


class Draws(Node):
    """All that a step takes from its key alone; `step` accepts it instead of the key."""

    step: PyTree  # the key, or the draws, of the step itself
    reset_state: PyTree  # where the next episode would start
    reset_obs: PyTree


def draw(env: Any, key: jax.Array) -> PyTree:
    """The environment's draws from a key; the key itself, if it has no `draw`.

    Example:
      >>> from jaxroll.envs import make_env
      >>> env = make_env("CartPole-v1")
      >>> key, (state, _) = jax.random.key(1), env.reset(jax.random.key(0))
      >>> _, one = env.step(key, state, 1)
      >>> _, other = env.step(draw(env, key), state, 1)
      >>> bool((one.obs == other.obs).all())
      True
    """
    own = getattr(env, "draw", None)
    return key if own is None else own(key)


MEMBERS = ("observation_space", "action_space", "reset", "step")
MASK = "action_mask"  # the key of a dict observation: which actions are allowed


def time_limit(env: Any) -> float | None:
    """The fewest steps of a truncated episode; infinity: none is truncated; None: not known.

    An environment states it by an attribute `time_limit`. One whose `step`, wrapped by `autoreset`,
    returns four values never truncates. `collect` reads it to size its rows for final observations;
    an environment that truncates earlier than it states loses bootstraps, which are counted.

    Example:
      >>> from jaxroll.envs import make_env
      >>> time_limit(make_env("CartPole-v1"))
      500
    """
    return getattr(env, "time_limit", None)


def autoreset(env: Any) -> Env:
    """An `Env` from an environment that stops at the end of an episode.

    Args:
      env: a frozen dataclass with `observation_space`, `action_space`, `reset(key) -> (state,
        obs)` and `step(key, state, action)`, which returns `(state, obs, reward, terminated)`,
        or the same with `truncated` as a fifth value, or `(state, TimeStep)`.

    Example, a corridor with a reward at its end:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> from jaxroll import spaces
      >>> @dataclasses.dataclass(frozen=True)
      ... class Corridor:
      ...     length: int = 5
      ...     observation_space = spaces.Box.create(0, 5, (1,))
      ...     action_space = spaces.Discrete(2)
      ...
      ...     def reset(self, key):
      ...         return jnp.zeros(1), jnp.zeros(1)
      ...
      ...     def step(self, key, position, action):
      ...         position = jnp.maximum(position + 2.0 * action - 1, 0)
      ...         arrived = position[0] >= self.length
      ...         return position, position, jnp.where(arrived, 1.0, 0.0), arrived
      >>> env = autoreset(Corridor())
      >>> state, obs = env.reset(jax.random.key(0))
      >>> state, step = env.step(jax.random.key(1), state, jnp.int32(1))
      >>> step.obs, step.final_obs, bool(step.terminated)
      (Array([1.], dtype=float32), Array([1.], dtype=float32), False)
    """
    if isinstance(env, type):
        raise TypeError(f"autoreset needs an environment, got {env}, a class: make one of it.")
    missing = ", ".join(name for name in MEMBERS if not hasattr(env, name))
    if missing:
        raise TypeError(
            f"autoreset needs an environment, got {type(env).__name__} without {missing}."
        )
    check_hashable(env)
    return AutoReset(env)


def check_hashable(env: Any) -> None:
    """Raise unless an environment can be a static argument of a program."""
    try:
        hash(env)
    except TypeError:
        raise TypeError(
            f"An environment must be hashable, got {type(env).__name__}. Make it a frozen value: "
            "@dataclasses.dataclass(frozen=True)."
        ) from None


class SameSpaces:
    """The spaces of the environment within."""

    env: Any

    @property
    def observation_space(self) -> Space:
        """The environment's own."""
        return self.env.observation_space

    @property
    def action_space(self) -> Space:
        """The environment's own."""
        return self.env.action_space


@dataclasses.dataclass(frozen=True)
class AutoReset(SameSpaces):
    """What `autoreset` makes: the environment, started again where an episode has ended."""

    env: Any

    @property
    def time_limit(self) -> float | None:
        """The environment's own; infinity if its `step` returns four values."""
        known = time_limit(self.env)
        if known is not None:
            return known
        outputs = []

        def step() -> None:
            key = jax.random.key(0)
            outputs.append(self.env.step(key, self.env.reset(key)[0], zeros(self.action_space)))

        jax.eval_shape(step)
        return math.inf if isinstance(outputs[0], tuple) and len(outputs[0]) == 4 else None

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Start an episode: (state, obs), in the dtypes that a step gives if these are wider."""
        state, obs = self.env.reset(key)
        # The repr tells 0 from 0.0, which are equal.
        dtypes = _dtypes_after_step(self.env, repr(self.env), jnp.result_type(float))
        return _cast((state, obs), dtypes)

    def draw(self, key: jax.Array) -> Draws:
        """The step's own key, and the start of the next episode."""
        step_key, reset_key = jax.random.split(key)
        return Draws(step_key, *self.reset(reset_key))

    def step(self, key: Any, state: PyTree, action: PyTree) -> tuple[PyTree, TimeStep]:
        """Take one step, then reset if the episode ended; `key` may be what `draw` gave."""
        draws = key if isinstance(key, Draws) else self.draw(key)
        state, step = _time_step(self.env.step(draws.step, state, action))
        return reset_where_done(state, step, draws)


def reset_where_done(state: PyTree, step: TimeStep, draws: Draws) -> tuple[PyTree, TimeStep]:
    """Go on with the reset state and observation if the episode has ended.

    The reset is computed in any case: under `vmap` some environment ends almost always.
    """
    done = jnp.logical_or(step.terminated, step.truncated)
    state = select(done, draws.reset_state, state, "state")
    return state, step.replace(obs=select(done, draws.reset_obs, step.obs, "observation"))


def select(done: jax.Array, new: PyTree, old: PyTree, name: str) -> PyTree:
    """`new` if done, otherwise `old`, in the dtypes that hold both."""
    dtypes = common_dtypes(new, old, name)
    new, old = _cast(new, dtypes), _cast(old, dtypes)
    return jax.tree.map(lambda x, y: jax.lax.select(done, x, y), new, old)


def _cast(tree: PyTree, dtypes: PyTree) -> PyTree:
    return jax.tree.map(lambda x, dtype: jnp.asarray(x).astype(dtype), tree, dtypes)


@functools.lru_cache(maxsize=256)
def _dtypes_after_step(env: Any, _repr: str, _float: Any) -> PyTree:
    """The dtypes of (state, obs), such as both a reset and a step can give them; traced once."""

    def reset_and_step() -> tuple:
        key = jax.random.key(0)
        state, obs = env.reset(key)
        action = jax.tree.map(jnp.asarray, zeros(env.action_space))
        after, step = _time_step(env.step(key, state, action))
        return (state, obs), (after, step.obs)

    reset, step = jax.eval_shape(reset_and_step)
    return tuple(common_dtypes(*both) for both in zip(reset, step, ("state", "observation")))


def common_dtypes(reset: PyTree, step: PyTree, name: str, *, can_widen: bool = True) -> PyTree:
    """For each leaf the dtype that holds what reset and step gave, or an error that names it."""
    structures = jax.tree.structure(reset), jax.tree.structure(step)
    if structures[0] != structures[1]:
        raise ValueError(
            f"The {name} must have the same structure after reset and after step, got "
            f"{structures[0]} and {structures[1]}."
        )

    def common(path: Any, x: Any, y: Any) -> Any:
        leaf = f"The {name}{jax.tree_util.keystr(path)}"
        if jnp.shape(x) != jnp.shape(y):
            raise ValueError(
                f"{leaf} must have the same shape after reset and after step, got {jnp.shape(x)} "
                f"and {jnp.shape(y)}."
            )
        before, after = jnp.result_type(x), jnp.result_type(y)
        if before == after:
            return before
        dtype = jnp.promote_types(before, after)
        is_float = jnp.issubdtype(before, jnp.inexact), jnp.issubdtype(after, jnp.inexact)
        if not can_widen or is_float == (False, True) or dtype not in (before, after):
            raise TypeError(
                f"{leaf} must keep its dtype, but is {before} after reset and {after} after step. "
                f"Start with {after} in reset, for instance jnp.{after.name}(0)."
            )
        return dtype

    return jax.tree_util.tree_map_with_path(common, reset, step)


def _time_step(out: Any) -> tuple[PyTree, TimeStep]:
    """What a user's `step` returned, in the one form."""
    match out:
        case (state, TimeStep() as step):
            ends = step.terminated, step.truncated
            return state, time_step(step.obs, step.reward, *ends, step.info)
        case (state, obs, reward, terminated):
            return state, time_step(obs, reward, terminated, False)
        case (state, obs, reward, terminated, truncated):
            return state, time_step(obs, reward, terminated, truncated)
    raise TypeError(
        "step must return (state, obs, reward, terminated), the same with truncated, or "
        f"(state, jaxroll.types.TimeStep), got {describe(out)}."
    )


def describe(out: Any) -> str:
    """What a function returned, for an error."""
    return f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__


def time_step(
    obs: PyTree, reward: Any, terminated: Any, truncated: Any, info: Any = None
) -> TimeStep:
    """A `TimeStep` before any reset: float32 reward, boolean flags, `final_obs` = `obs`."""
    arrays = {"reward": reward, "terminated": terminated, "truncated": truncated}
    for name, value in arrays.items():
        array = check_array(name, value)
        if array.shape != ():
            raise ValueError(
                f"{name} must be a single value, of shape (), got shape {array.shape}: an "
                f"environment steps one at a time. Use {name}[0], or {name}.any()."
            )
        if name != "reward" and jnp.issubdtype(array.dtype, jnp.inexact):
            raise TypeError(
                f"{name} must be True or False, got {array.dtype}. Use a comparison: {name} > 0."
            )
        arrays[name] = jnp.asarray(value, jnp.float32 if name == "reward" else bool)
    return TimeStep(obs=obs, **arrays, final_obs=obs, info={} if info is None else info)


class HostStep(NamedTuple):
    """One step of B host environments, in one form whatever their way of resetting.

    Where the environments reset on the same step, `obs` is the first observation of the next
    episode and `final_obs` holds the successor. Where they reset on the next step, `final_obs`
    is None, `obs` is the successor itself, and the next step only resets: it is not `valid`, its
    reward is 0, and its `obs` is first.
    """

    obs: PyTree  # [B, ...] what to act on next
    reward: np.ndarray  # [B] float32
    terminated: np.ndarray  # [B] bool
    truncated: np.ndarray  # [B] bool
    final_obs: PyTree | None  # [B, ...] read only where an episode ended; None: obs is it
    valid: np.ndarray  # [B] bool: False where the step did nothing but reset
    is_first: np.ndarray  # [B] bool: obs starts an episode


class HostEnv(abc.ABC):
    """B environments that run on the host, in step with each other.

    Arrays are numpy's, float32 and int32 where the source has float64 and int64. An exception of
    an environment is raised as it is, after the others have been closed.
    """

    num_envs: int  # B
    observation_space: Space  # of one environment
    action_space: Space  # of one environment
    resets_on_next_step: bool  # whether some steps are not valid; see HostStep

    @abc.abstractmethod
    def reset(self, seed: int) -> PyTree:
        """Start an episode in each environment, everything random drawn from `seed`: obs."""

    @abc.abstractmethod
    def step(self, actions: PyTree) -> HostStep:
        """Check the actions, [B, ...], and take one step in each environment."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the environments; a second call does nothing."""

    def __enter__(self) -> HostEnv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def empty_step(envs: HostEnv) -> HostStep:
    """Zeros and False in the shapes of a step."""
    obs = zeros(envs.observation_space, (envs.num_envs,))
    no = np.zeros(envs.num_envs, bool)
    return HostStep(obs, no.astype(np.float32), no, no, obs, no, no)


class HostEnvSpec(abc.ABC):
    """How to make host environments: a frozen, hashable value that keeps none open.

    `make(num_envs)` opens them, so that an agent can decide how many each of its actors has.
    """

    @property
    def observation_space(self) -> Space:
        """Of one environment, which is opened once to read it."""
        return host_spaces(self)[0]

    @property
    def action_space(self) -> Space:
        """Of one environment, which is opened once to read it."""
        return host_spaces(self)[1]

    @abc.abstractmethod
    def make(self, num_envs: int) -> HostEnv:
        """Open `num_envs` environments."""


@functools.lru_cache(maxsize=256)
def host_spaces(spec: HostEnvSpec) -> tuple[Space, Space]:
    """(observation space, action space) of one environment, which is opened and closed."""
    with spec.make(1) as envs:
        return envs.observation_space, envs.action_space
