"""Devices and hosts: meshes, one program on all of them, several processes."""

from jaxroll.parallel.mesh import ACTORS, check_mesh, make_mesh, place, shardings
from jaxroll.parallel.multihost import (
    PEER_LOST,
    PeerLostError,
    initialize,
    is_peer_lost,
    local,
    local_mesh,
    peer_guard,
    process_max,
)
from jaxroll.parallel.spmd import on_mesh

__all__ = [
    "ACTORS",
    "PEER_LOST",
    "PeerLostError",
    "check_mesh",
    "initialize",
    "is_peer_lost",
    "local",
    "local_mesh",
    "make_mesh",
    "on_mesh",
    "peer_guard",
    "place",
    "process_max",
    "shardings",
]
