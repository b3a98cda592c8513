"""envpool's environments: C++ simulators stepped by a pool of threads.

They reset on the next step. Their random numbers are seeded when the pool is made, so `reset`
with another seed makes the pool anew.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxroll.checks import check_count, did_you_mean
from jaxroll.envs.actions import OutOfRange
from jaxroll.envs.base import HostEnvSpec, host_spaces
from jaxroll.envs.deadline import DEFAULT_TIMEOUT
from jaxroll.envs.make import Source
from jaxroll.envs.options import Options, UnknownNameError, attempt
from jaxroll.envs.vector import VectorHostEnv


class EnvpoolHostEnv(VectorHostEnv):
    """A `HostEnv` of one pool; made by `EnvpoolSpec.make`."""

    def __init__(self, spec: EnvpoolSpec, num_envs: int):
        self._spec = spec
        super().__init__(
            spec.open(num_envs, seed=0),
            autoreset_mode="NextStep",
            out_of_range=spec.out_of_range,
            env_timeout=spec.env_timeout,
        )

    def _reset_envs(self, seed: int) -> tuple[Any, Any]:
        # Always a new pool: a pool that has played does not return to where its seed began.
        self._envs.close()
        self._envs = self._spec.open(self.num_envs, seed)
        return self._envs.reset()


@dataclasses.dataclass(frozen=True)
class EnvpoolSpec(HostEnvSpec):
    """How to make a pool of envpool environments; see `make` for the fields."""

    name: str
    options: Options = Options()
    out_of_range: OutOfRange = "clip"
    env_timeout: float | None = DEFAULT_TIMEOUT

    @property
    def arguments(self) -> tuple[str, dict[str, Any]]:
        """(name, options) with which `make_env` makes it."""
        own: dict[str, Any] = {"out_of_range": self.out_of_range}
        if self.env_timeout not in (None, DEFAULT_TIMEOUT):
            own["env_timeout"] = self.env_timeout
        return f"envpool:{self.name}", {**own, **self.options.as_dict()}

    def make(self, num_envs: int) -> EnvpoolHostEnv:
        """Open a pool of `num_envs` environments, stepped together."""
        num_envs = check_count("num_envs", num_envs)
        return EnvpoolHostEnv(self, num_envs)

    def open(self, num_envs: int, seed: int) -> Any:
        """envpool's own object."""
        import envpool

        return envpool.make(
            self.name,
            env_type="gymnasium",
            num_envs=num_envs,
            seed=seed,
            **self.options.as_dict(),
        )


def make(
    name: str,
    *,
    out_of_range: OutOfRange = "clip",
    env_timeout: float | None = DEFAULT_TIMEOUT,
    **options: Any,
) -> EnvpoolSpec:
    """An envpool environment by name; one is opened at once, to read its spaces, and closed.

    Args:
      name: as in `envpool.make`.
      out_of_range: "clip" or "error", for `Box` actions past their bounds.
      env_timeout: seconds that a reset or a step may take; None: any time.
      **options: arguments of the environment.
    """
    if name not in names():
        raise UnknownNameError(
            f"{name!r} is not an environment of envpool.{did_you_mean(name, names())}"
        )
    spec = EnvpoolSpec(name, Options(options), out_of_range, env_timeout)
    attempt(name, options, lambda: host_spaces(spec))
    return spec


def names() -> list[str]:
    """All names of envpool."""
    import envpool

    return sorted(envpool.list_all_envs())  # pyright: ignore[reportAttributeAccessIssue]


SOURCE = Source("envpool", package="envpool", extra="envpool", make=make, names=names)
