"""Several hosts on this one: network namespaces with a link each, host names and folders of their own.

Needs Linux and the right to make them (root in a container does); where there is none, tests on hosts are skipped.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_NETWORK = "10.201.77"
_COUNT = iter(range(1000))


@cache
def allowed() -> bool:
    """Return whether this process may make hosts."""
    try:
        with hosts(1):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@dataclass(frozen=True)
class Host:
    """A host: what a process that is to be on it has to enter.

    Attributes:
        name: Its name, which the others can resolve.
        address: Its address.
        namespace: Its network namespace.
        hosts_file: Names and addresses of all hosts.
        folders: Folder as every host calls it -> the folder that is there on this one.
    """

    name: str
    address: str
    namespace: str
    hosts_file: Path
    folders: Mapping[Path, Path]

    def enter(self) -> None:
        """Move this process, which must have one thread, to the host."""
        library = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}") as network:
            _checked(library.setns(network.fileno(), _CLONE_NEWNET))
        _checked(library.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
        socket.sethostname(self.name)
        _run("mount", "--make-rprivate", "/")
        _run("mount", "--bind", str(self.hosts_file), "/etc/hosts")
        for shared, own in self.folders.items():
            _run("mount", "--bind", str(own), str(shared))

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on the host, in a process group of its own."""
        return subprocess.Popen(command, preexec_fn=self.enter, process_group=0, text=True, **options)

    def cut(self) -> None:
        """Cut the host off the others; nobody is told."""
        _run("ip", "-n", self.namespace, "link", "set", "eth0", "down")

    def processes(self) -> list[int]:
        """Return the processes that are on the host."""
        out = subprocess.run(
            ["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True
        )
        return [int(pid) for pid in out.stdout.split()]


@contextmanager
def hosts(
    count: int, folder: Path | None = None, own: Callable[[int], Mapping[Path, Path]] = lambda number: {}
) -> Iterator[list[Host]]:
    """Make hosts that see each other and nothing else; all processes on them have ended afterwards.

    Args:
        count: How many; they are called `host-a`, `host-b` and so on.
        folder: Where their file of names may lie.
        own: Number of a host -> folders that are its own.
    """
    mark = f"sw{os.getpid()}n{next(_COUNT)}"
    names = {f"host-{chr(97 + i)}": f"{_NETWORK}.{i + 1}" for i in range(count)}
    file = (folder or Path("/tmp")) / f"{mark}-hosts"
    made: list[Host] = []
    _run("ip", "netns", "add", mark)
    try:
        file.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in names.items()))
        _run("ip", "-n", mark, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", mark, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(names.items()):
            made.append(Host(name, address, f"{mark}-{number}", file, own(number)))
            _connect(made[-1], mark, number)
        yield made
    finally:
        for host in made:
            for pid in host.processes():
                os.kill(pid, 9)
            _run("ip", "netns", "del", host.namespace)
        _run("ip", "netns", "del", mark)
        file.unlink(missing_ok=True)


def _connect(host: Host, switch: str, number: int) -> None:
    """Make the namespace of a host, with a link to the switch."""
    space, port = host.namespace, f"port{number}"
    _run("ip", "netns", "add", space)
    _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", space, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _run("ip", "-n", space, "link", "set", "eth0", "up")
    _run("ip", "-n", space, "link", "set", "lo", "up")
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
    _run("ip", "-n", switch, "link", "set", port, "up")


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
