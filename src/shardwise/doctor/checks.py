"""What the ranks have said of themselves, compared: what is wrong, on which host, and what would mend it."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

GIB = 2**30
MIB = 2**20
LITTLE = GIB
"""Less free memory or disk than that is little for any model."""
LITTLE_SHM = 64 * MIB
"""What Docker gives a container by default, for all of it; NCCL takes some for each pair of ranks of a machine."""

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        says: What was found.
        problems: What is wrong, each with the host and with what would mend it; none if all is well.
    """

    name: str
    says: str
    problems: tuple[str, ...] = ()


def checks(ranks: Sequence[Facts], weights: int = 0) -> list[Check]:
    """Return all checks of what the ranks said, in rank order.

    Args:
        ranks: What each said.
        weights: Bytes of the weights that they are to share, if they are known.
    """
    looks = (_versions, _devices, partial(_memory, weights=weights), _disk, _cores)
    several = len(_by_node(ranks)) > 1
    return [_hosts(ranks), *network_checks(ranks, several), *(look(ranks) for look in looks)]


def network_checks(ranks: Sequence[Facts], several: bool) -> list[Check]:
    """Return the checks of names and interfaces, which can be made before ranks have met.

    Args:
        ranks: What each said of its place in the network.
        several: Whether they are on several machines.
    """
    return [_names(ranks), _interfaces(ranks, several)]


def who(fact: Facts) -> str:
    """Return a rank and its host, for messages."""
    return f"{fact['host']} (rank {fact['rank']})"


def by_value(ranks: Sequence[Facts], value: Callable[[Facts], Any]) -> str:
    """Return e.g. `2.13.0: a (ranks 0, 1); 2.12.0: b (rank 2)`; the value alone if all have the same."""
    groups: dict[Any, dict[str, list[str]]] = {}
    for fact in ranks:
        groups.setdefault(value(fact), {}).setdefault(fact["host"], []).append(str(fact["rank"]))
    if len(groups) == 1:
        return str(next(iter(groups)))
    return "; ".join(
        f"{key}: "
        + ", ".join(
            f"{host} (rank{'s' if len(of) > 1 else ''} {', '.join(of)})" for host, of in hosts.items()
        )
        for key, hosts in groups.items()
    )


def _hosts(ranks: Sequence[Facts]) -> Check:
    machines = _by_node(ranks)
    listing = ", ".join(
        f"{facts[0]['host']}: {', '.join(str(f['rank']) for f in facts)}" for facts in machines
    )
    return Check("ranks", f"{len(ranks)} on {_plural(len(machines), 'machine')} ({listing})")


def _names(ranks: Sequence[Facts]) -> Check:
    problems = [
        f"{who(fact)}: the name {name} does not resolve ({found}): add it to /etc/hosts or to the DNS"
        for fact in ranks
        for name, found in fact["names"].items()
        if isinstance(found, str)
    ]
    known = dict.fromkeys(
        f"{name} is {found[0]}"
        for fact in ranks
        for name, found in fact["names"].items()
        if isinstance(found, list)
    )
    return Check("names", ", ".join(known), tuple(dict.fromkeys(problems)))


def _interfaces(ranks: Sequence[Facts], several: bool) -> Check:
    problems: list[str] = []
    for fact in ranks:
        there, asked = fact["interfaces"]["there"], fact["interfaces"]["asked"]
        problems += [
            f"{who(fact)}: {backend}_SOCKET_IFNAME is {name!r}, and there is no such interface: set it to one of "
            f"{', '.join(there)}"
            for backend, names in asked.items()
            for name in _required(backend, names)
            if not any(known == name or (backend == "NCCL" and known.startswith(name)) for known in there)
        ]
        own = fact["names"].get(fact["host"])
        if several and isinstance(own, list) and asked["GLOO"] is None and _all_local(own):
            problems.append(
                f"{who(fact)}: its own name leads to {own[0]}, where other machines cannot reach it: give "
                f"{fact['host']} its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface between "
                "the machines"
            )
    taken = by_value(
        ranks, lambda fact: fact["interfaces"]["asked"]["GLOO"] or _first(fact["interfaces"]["by_name"])
    )
    nccl = dict.fromkeys(filter(None, (fact["interfaces"]["asked"]["NCCL"] for fact in ranks)))
    return Check(
        "interfaces", f"gloo takes {taken}; NCCL {', '.join(nccl) or 'chooses by itself'}", tuple(problems)
    )


def _required(backend: str, names: str | None) -> Iterator[str]:
    """Yield the interfaces that a variable asks for; of NCCL, ^ excludes, a name is a prefix, and one after = whole."""
    if names and not names.startswith("^"):
        yield from (name.removeprefix("=") if backend == "NCCL" else name for name in names.split(","))


def _all_local(addresses: Sequence[str]) -> bool:
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _versions(ranks: Sequence[Facts]) -> Check:
    packages = dict.fromkeys(name for fact in ranks for name in fact["versions"])
    differing = [name for name in packages if len({fact["versions"].get(name) for fact in ranks}) > 1]
    problems = []
    for name in differing:
        found = by_value(ranks, lambda fact: fact["versions"].get(name, "none"))  # noqa: B023  # called at once
        problems.append(f"{name} differs ({found}): install the same on all machines")
    return Check("versions", ", ".join(f"{k} {v}" for k, v in ranks[0]["versions"].items()), tuple(problems))


def _devices(ranks: Sequence[Facts]) -> Check:
    problems = []
    kinds = {fact["device"]["name"].partition(":")[0] for fact in ranks}
    if len(kinds) > 1:
        kind = by_value(ranks, lambda fact: fact["device"]["name"])
        problems.append(f"ranks compute on devices of different kinds ({kind}): say --device")
    places = Counter((*fact["node"], fact["device"]["uuid"]) for fact in ranks if fact["device"]["uuid"])
    problems += [
        f"{place[0]}: {count} ranks use one device ({place[-1]}): start as many as there are devices, and let each "
        "have its own, as `srun --gpus-per-task=1` does"
        for place, count in places.items()
        if count > 1
    ]
    models = by_value(ranks, lambda fact: fact["device"]["model"])
    return Check("devices", models, tuple(problems))


def _memory(ranks: Sequence[Facts], weights: int) -> Check:
    """Weights that are shared out evenly are the least that a rank needs; nobody knows the activations yet."""
    problems, least = [], max(LITTLE, weights // len(ranks))
    for facts in _by_node(ranks):
        on_host = sum(fact["device"]["free"] is None for fact in facts)
        had = facts[0]["memory"]["available"]
        if had < (needed := max(LITTLE, least * on_host)):
            problems.append(
                f"{facts[0]['host']}: {_gib(had)} of memory are left, and {_plural(len(facts), 'rank')} need "
                f"{_gib(needed)} at least: end other programs, or start fewer ranks here"
            )
        problems += [
            f"{who(fact)}: {_gib(fact['device']['free'])} of {fact['device']['name']} are free, and a rank needs "
            f"{_gib(least)} at least: end other programs on it, or share the weights among more ranks"
            for fact in facts
            if fact["device"]["free"] is not None and fact["device"]["free"] < least
        ]
    on_devices = [fact["device"]["free"] for fact in ranks if fact["device"]["free"] is not None]
    says = f"{_gib(min(fact['memory']['available'] for fact in ranks))} left"
    return Check(
        "memory", says + (f", {_gib(min(on_devices))} on devices" if on_devices else ""), tuple(problems)
    )


def _disk(ranks: Sequence[Facts]) -> Check:
    problems = []
    for facts in _by_node(ranks):
        host, disk = facts[0]["host"], facts[0]["disk"]
        problems += [
            f"{host}: {_gib(free)} are free for the {name}: make room, or set {variable} to another folder"
            for name, variable in (("temporary folder", "TMPDIR"), ("hub cache", "HF_HUB_CACHE"))
            if (free := disk[name]) is not None and free < LITTLE
        ]
        shm = disk["/dev/shm"]
        on_devices = [fact for fact in facts if fact["device"]["free"] is not None]
        if shm is not None and len(on_devices) > 1 and shm <= LITTLE_SHM:
            problems.append(
                f"{host}: {shm // MIB} MiB are free in /dev/shm, by which NCCL connects the ranks of a machine: start "
                "the container with --shm-size=1g, or mount an emptyDir of medium Memory there"
            )
    least = {name: min((f["disk"][name] for f in ranks if f["disk"][name] is not None), default=None)
             for name in ranks[0]["disk"]}  # fmt: skip
    says = ", ".join(f"{name} {_gib(free)}" for name, free in least.items() if free is not None)
    return Check("disk", f"{says} free", tuple(problems))


def _cores(ranks: Sequence[Facts]) -> Check:
    problems = [
        f"{facts[0]['host']}: {_plural(len(facts), 'rank')} have {_plural(facts[0]['cores'], 'core')}: start fewer, or "
        "ask for as many cores (`--cpus-per-task`, a pod's `resources`)"
        for facts in _by_node(ranks)
        if facts[0]["cores"] < len(facts)
    ]
    return Check(
        "cores", by_value([f[0] for f in _by_node(ranks)], lambda fact: fact["cores"]), tuple(problems)
    )


def _by_node(ranks: Sequence[Facts]) -> list[list[Facts]]:
    """Return what the ranks said, machine by machine."""
    machines: dict[tuple[str, ...], list[Facts]] = {}
    for fact in ranks:
        machines.setdefault(tuple(fact["node"]), []).append(fact)
    return list(machines.values())


def _first(names: Sequence[str]) -> str:
    return names[0] if names else "any"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
