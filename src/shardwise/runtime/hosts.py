"""Which ranks share a machine: who should be neighbours, and what it costs where they cannot be."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from itertools import chain

logger = logging.getLogger(__name__)


def placed(hosts: Sequence[Hashable], block: int) -> list[int]:
    """Return the ranks in an order in which blocks of `block` lie inside one machine wherever that is possible.

    Ranks that are numbered machine by machine keep their order. A launcher may also number them round the machines
    (`srun --distribution=cyclic`), or start more on one than on another; what no machine has enough ranks for comes
    last, or first where rank 0 is of it: rank 0 is always the first.

    Args:
        hosts: The machine of each rank.
        block: The number of ranks that should be together; it divides their number.
    """
    machines: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        machines.setdefault(host, []).append(rank)
    whole = [ranks[: len(ranks) // block * block] for ranks in machines.values()]
    left = [ranks[len(ranks) // block * block :] for ranks in machines.values()]
    return list(chain(*whole, *left) if whole[0] else chain(*left, *whole))


def tell_crossing(axis: str, hosts: Sequence[Sequence[str]]) -> None:
    """Say in one line what it costs that a group of ranks lies across machines; nothing if it does not, or was said.

    Args:
        axis: What the ranks share, for the message.
        hosts: The machine of each rank, its name first.
    """
    machines = dict.fromkeys(tuple(host) for host in hosts)
    line = (axis, tuple(machines))
    if len(machines) < 2 or line in _told:
        return
    _told.add(line)
    logger.warning(
        "%s=%d lies across %d machines (%s): each of its sums, one for every attention and every feed-forward of each "
        "forward, goes over the network; `shardwise plan MODEL --tp %d` says how many bytes that is, `shardwise "
        "doctor` how fast it goes. Of cfg, dp and ulysses, which send less, a higher degree would let tp be lower",
        axis, len(hosts), len(machines), ", ".join(name for name, *_ in machines), len(hosts),
    )  # fmt: skip


_told: set[tuple[str, tuple[tuple[str, ...], ...]]] = set()
