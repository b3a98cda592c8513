"""Host environments inside a user's own jit, through `io_callback`.

A callback that raises inside a program with collectives kills the process without a Python error.
This one never raises: it keeps the exception, answers with the last good output from then on, and
`check` raises once the program is done.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxroll.envs.base import HostEnv, HostStep, empty_step
from jaxroll.types import Array, PyTree


class CallbackEnv:
    """B host environments that can be stepped inside jit.

    `step` takes and returns a token, the number of steps taken: it puts the steps in order, in a
    scan's carry, without the cost of an ordered effect. `final_obs` is always an array: it equals
    `obs` where no episode ended. On leaving the `with` block, or in `check`, an exception of
    the environments is raised.

    Example:
      >>> from jaxroll.envs import make_env
      >>> host_env = make_env("gymnasium:CartPole-v1").make(4)
      >>> with CallbackEnv(host_env) as envs:
      ...     token, obs = envs.reset(seed=0)
      ...     @jax.jit
      ...     def program(token):
      ...         def step(token, _):
      ...             token, step = envs.step(token, jnp.zeros(4, jnp.int32))
      ...             return token, step.reward
      ...         return jax.lax.scan(step, token, length=5)
      ...     token, rewards = program(token)
      >>> rewards.shape
      (5, 4)
      >>> host_env.close()
    """

    def __init__(self, envs: HostEnv):
        self.envs = envs
        self._error: BaseException | None = None
        self._steps_taken = -1  # not reset yet
        self._last = empty_step(self.envs)

    def reset(self, seed: int) -> tuple[Array, PyTree]:
        """Start an episode in each environment, outside of jit: (token, obs)."""
        obs = self.envs.reset(seed)
        self._error, self._steps_taken = None, 0
        self._last = self._fill(empty_step(self.envs)._replace(obs=obs, final_obs=obs))
        return jnp.zeros((), jnp.int32), jax.device_put(self._last.obs, may_alias=False)

    def step(self, token: Array, actions: PyTree) -> tuple[Array, HostStep]:
        """One step in each environment, inside jit: (token, step)."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), empty_step(self.envs)
        )
        token_shape = jax.ShapeDtypeStruct((), np.int32)
        return io_callback(self._call, (token_shape, shapes), token, actions)

    def check(self) -> None:
        """Wait for the running programs; raise what an environment raised in one of them."""
        jax.effects_barrier()
        error, self._error = self._error, None
        if error is not None:
            self._steps_taken = -1
            raise RuntimeError(
                "A host environment failed inside a jitted program; what the program returned "
                "after that is not experience. Its own exception is above."
            ) from error

    def __enter__(self) -> CallbackEnv:
        return self

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        if exc_type is None:
            self.check()

    def _call(self, token: Any, actions: PyTree) -> tuple[np.ndarray, HostStep]:
        token = np.asarray(token, np.int32)
        if self._error is None:
            try:
                if int(token) != self._steps_taken:
                    raise RuntimeError(
                        f"The token must be the one that the last step returned, "
                        f"{self._steps_taken}, got {int(token)}. Carry it through the program, "
                        "and start with reset."
                    )
                self._last = self._fill(self.envs.step(jax.tree.map(np.asarray, actions)))
                self._steps_taken += 1
            except BaseException as error:
                self._error = error
        return token + np.int32(1), self._last

    def _fill(self, step: HostStep) -> HostStep:
        """Copies that the environments do not write into, with no field missing."""
        if step.final_obs is None:
            step = step._replace(final_obs=step.obs)
        return jax.tree.map(np.array, step)
