"""Devices and hosts: meshes, one program on all of them, several processes."""

from jaxroll.parallel.mesh import ACTORS, check_mesh, make_mesh, place, shardings
from jaxroll.parallel.multihost import PEER_LOST, any_process, initialize, local
from jaxroll.parallel.spmd import on_mesh

__all__ = [
    "ACTORS",
    "PEER_LOST",
    "any_process",
    "check_mesh",
    "initialize",
    "local",
    "make_mesh",
    "on_mesh",
    "place",
    "shardings",
]
