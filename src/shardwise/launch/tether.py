"""How ranks that no launcher watches together hear of each other's end: one connection of each to the first rank.

The tasks of srun and the pods of Kubernetes are not ended when one of them fails. The system closes the connections of
a process that dies, however it dies; where a whole host is gone, it gives up after `SILENCE` seconds. No rank has to
answer for that, so one that computes for minutes is not taken for dead.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardwise.errors import RankFailure
from shardwise.launch.reach import LOOPBACK, addresses_of, listen
from shardwise.runtime.seal import SECRET, opened, sealed

SILENCE = 20
"""Seconds without a sign of life of the other host after which the system gives a connection up."""
_SUBJECT = "tether"
_WORD = 65536
_MESSAGE = 4000
_CONNECT = 30.0
_HELLO = 5.0
"""Seconds in which one that connects has to say who it is: anybody may connect."""

Lost = Callable[[str], object]


class Tether:
    """The connections of one rank, looked after by a thread until `let_go`.

    Args:
        rank, ranks: This one, and how many there are.
        lost: Called once, in that thread, with what has become of another rank.
    """

    def __init__(self, rank: int, ranks: int, lost: Lost) -> None:
        self._rank, self._ranks, self._lost = rank, ranks, lost
        self._links: dict[socket.socket, str] = {}
        self._over = threading.Event()
        self._server: socket.socket | None = None
        self._fate: dict[str, Any] | None = None
        self._secret = os.environ.get(SECRET, "").encode()

    def hold(self) -> int:
        """On the first rank: let the others come, and return the port at which they may."""
        self._server = listen(0)
        threading.Thread(
            target=self._watch, args=(self._server,), name="shardwise-tether", daemon=True
        ).start()
        port: int = self._server.getsockname()[1]
        return port

    def tie(self, address: str, port: int) -> None:
        """On another rank: hold on to the first one.

        Raises:
            RankFailure: it cannot be reached.
        """
        try:
            where = address if address == LOOPBACK else addresses_of(address, _CONNECT)[0]
            link = socket.create_connection((where, port), timeout=_CONNECT)
        except OSError as error:
            raise RankFailure(
                f"{socket.gethostname()} cannot reach rank 0 at {address}, port {port}: {error}; ranks of several "
                "machines need any port of each other: does a firewall stand between them?"
            ) from error
        _watch_over(link)
        self._links[link] = f"rank 0 of {self._ranks} at {address}"
        _send(link, {"rank": self._rank, "host": socket.gethostname()}, self._secret)
        threading.Thread(target=self._listen, args=(link,), name="shardwise-tether", daemon=True).start()

    def say(self, message: str) -> None:
        """Tell the others why this rank is about to end."""
        who = f"rank {self._rank} of {self._ranks} on {socket.gethostname()}"
        self._tell({"failed": f"{who} failed: {message[:_MESSAGE]}"})
        self._over.set()  # what follows from it is no news

    def let_go(self) -> None:
        """Part in peace: what the others do from now on does not matter to this rank, nor its end to them."""
        self._over.set()
        self._tell({"done": self._rank})
        for link in list(self._links):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
            link.close()
        if self._server is not None:
            self._server.close()

    def _tell(self, word: dict[str, Any]) -> None:
        for link in list(self._links):
            _send(link, word, self._secret)

    def _listen(self, link: socket.socket) -> None:
        """On another rank: wait for the word of the first, or for its end."""
        word = _received(link, self._secret)
        if self._over.is_set() or "done" in word:
            return
        self._lost(word.get("failed", f"{self._links[link]} has ended, or its host cannot be reached"))

    def _watch(self, server: socket.socket) -> None:
        """On the first rank: take in the others, and pass on what becomes of them."""
        selector = selectors.DefaultSelector()
        selector.register(server, selectors.EVENT_READ)
        while not self._over.is_set():
            for key, _ in selector.select(timeout=1):
                link = self._accepted(server) if key.fileobj is server else None
                if link is not None:
                    selector.register(link, selectors.EVENT_READ)
                elif key.fileobj is not server and isinstance(key.fileobj, socket.socket):
                    selector.unregister(key.fileobj)
                    self._hear(key.fileobj)

    def _accepted(self, server: socket.socket) -> socket.socket | None:
        try:
            link, _ = server.accept()
        except OSError:  # closed by `let_go`
            return None
        link.settimeout(_HELLO)
        who = _received(link, self._secret)
        if "rank" not in who:
            link.close()
            return None
        _watch_over(link)
        self._links[link] = f"rank {who['rank']} of {self._ranks} on {who.get('host')}"
        if self._fate is not None:  # it comes late
            _send(link, self._fate, self._secret)
        return link

    def _hear(self, link: socket.socket) -> None:
        """Take the last word of a rank, or its silence, to the others and to this one."""
        word, who = _received(link, self._secret), self._links.pop(link)
        link.close()
        if "done" in word or self._over.is_set():
            return
        message = word.get("failed", f"{who} has ended without a word, or its host cannot be reached")
        self._fate = {"failed": message}
        self._tell(self._fate)
        self._lost(message)


def _watch_over(link: socket.socket) -> None:
    """Have the system ask for a sign of life now and then."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", SILENCE // 5),
        ("TCP_USER_TIMEOUT", SILENCE * 1000),
    ):
        if hasattr(socket, name):  # not on every system
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(link: socket.socket, word: dict[str, Any], secret: bytes) -> None:
    with suppress(OSError):  # it is gone, which is heard of by other means
        link.sendall(sealed(_SUBJECT, json.dumps(word), secret).encode() + b"\n")


def _received(link: socket.socket, secret: bytes) -> dict[str, Any]:
    """Return the next word of another rank; an empty one if there is none any more, or it is of somebody else."""
    said = b""
    try:
        while not said.endswith(b"\n") and len(said) < _WORD:
            piece = link.recv(1)
            if not piece:
                break
            said += piece
        word = json.loads(opened(_SUBJECT, said.decode().rstrip("\n"), secret) or "")
    except (OSError, ValueError):
        return {}
    return word if isinstance(word, dict) else {}
