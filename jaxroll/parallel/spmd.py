"""Put a pure step on a mesh: the same program on every device, actors spread, the rest copied.

Replication is not checked by the compiler (`check_vma=False`): with the check on, environments that
create constants inside a scan would be refused. Instead every replicated output is computed by the
same arithmetic on the same gathered inputs on each device, and tests compare the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxroll.parallel.mesh import ACTORS
from jaxroll.types import PyTree


def on_mesh(
    function: Callable[..., Any], mesh: Mesh | None, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """`function(*args, axis_name=…)` over the mesh; without a mesh, the function as it is.

    Args:
      function: takes `axis_name`, behind which the other devices' actors are.
      mesh: from `make_mesh`, or None.
      in_specs: PartitionSpecs of the arguments (prefixes of them).
      out_specs: of the results.
    """
    if mesh is None:
        return lambda *args: function(*args, axis_name=None)
    return jax.shard_map(
        lambda *args: function(*args, axis_name=ACTORS),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
