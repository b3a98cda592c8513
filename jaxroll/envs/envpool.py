"""envpool's environments: C++ simulators stepped by a pool of threads.

They reset on the next step. Their random numbers are seeded when the pool is made, so `reset`
makes the pool anew: a pool that has played does not return to where its seed began.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxroll.checks import check_count
from jaxroll.envs.make import Source
from jaxroll.envs.vector import VectorHostEnv, VectorSpec


class EnvpoolHostEnv(VectorHostEnv):
    """A `HostEnv` of one pool; made by `EnvpoolSpec.make`."""

    def __init__(self, spec: EnvpoolSpec, num_envs: int):
        self._spec = spec
        super().__init__(spec.open(num_envs, seed=0), autoreset_mode="NextStep", **spec.settings())

    def _reset_envs(self, seed: int) -> tuple[Any, Any]:
        self._envs.close()
        self._envs = self._spec.open(self.num_envs, seed)
        return self._envs.reset()


@dataclasses.dataclass(frozen=True)
class EnvpoolSpec(VectorSpec):
    """How to make a pool of envpool environments; `options` are arguments of `envpool.make`."""

    source = "envpool"

    def make(self, num_envs: int) -> EnvpoolHostEnv:
        """Open a pool of `num_envs` environments, stepped together."""
        return EnvpoolHostEnv(self, check_count("num_envs", num_envs))

    def open(self, num_envs: int, seed: int) -> Any:
        """envpool's own object."""
        import envpool

        options = {"env_type": "gymnasium", "num_envs": num_envs, "seed": seed}
        make = envpool.make  # pyright: ignore[reportAttributeAccessIssue]
        return make(self.name, **options, **self.options.as_dict())


def names() -> list[str]:
    """All names of envpool."""
    import envpool

    return sorted(envpool.list_all_envs())  # pyright: ignore[reportAttributeAccessIssue]


SOURCE = Source("envpool", "envpool", "envpool", make=EnvpoolSpec.from_options, names=names)
