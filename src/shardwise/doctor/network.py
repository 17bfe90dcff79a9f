"""What a process finds out about names and interfaces. Needs no torch: where these are wrong, ranks do not start."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import Any

import psutil

from shardwise.launch.reach import addresses_of

RESOLVE_SECONDS = 3.0


def network(rank: int, node: Sequence[str]) -> dict[str, Any]:
    """Return what a rank says of its place in the network; `node` tells its machine from others."""
    host = socket.gethostname()
    return {"rank": rank, "node": node, "host": host, "names": names(), "interfaces": interfaces()}


def names() -> dict[str, list[str] | str]:
    """Return the names that ranks use, with their addresses or with what the resolver said."""
    asked = dict.fromkeys(filter(None, (socket.gethostname(), os.environ.get("MASTER_ADDR"))))
    return {name: _addresses(name) for name in asked if not is_address(name)}


def _addresses(name: str) -> list[str] | str:
    try:
        return addresses_of(name, RESOLVE_SECONDS)
    except OSError as error:
        return str(error)


def interfaces() -> dict[str, Any]:
    """Return the network interfaces with their addresses, and which are asked for or follow from this host's name."""
    there = {
        name: [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    own = _addresses(socket.gethostname())
    taken = [name for name, addresses in there.items() if isinstance(own, list) and {*own} & {*addresses}]
    asked = {backend: os.environ.get(f"{backend}_SOCKET_IFNAME") for backend in ("GLOO", "NCCL")}
    return {"there": there, "by_name": taken, "asked": asked}


def is_address(name: str) -> bool:
    """Return whether this is an address, and no name."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
