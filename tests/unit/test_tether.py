"""Ranks of several launchers: each hears of the others' end, and of nothing else."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest

from shardwise.errors import RankFailure
from shardwise.launch import reach as reaching
from shardwise.launch.reach import addresses_of, listen, reach
from shardwise.launch.tether import Tether
from shardwise.runtime.seal import SECRET

SOON = 20
QUIET = 0.3

RANK = """
import os, sys, time
from shardwise.launch.tether import Tether
say = lambda word: os.write(1, word.encode() + b"\\n")
tether = Tether(int(sys.argv[2]), 3, say)
tether.tie("127.0.0.1", int(sys.argv[1]))
if sys.argv[3] == "fails":
    tether.say("ValueError: boom")
if sys.argv[3] == "leaves":
    tether.let_go()
say("ready")
time.sleep(60)
"""

Star = tuple["queue.SimpleQueue[str]", list["subprocess.Popen[str]"], Tether]


@pytest.fixture
def star(request: pytest.FixtureRequest) -> Iterator[Star]:
    """The first of three ranks here, and two others, each a process; the second does what the test asks."""
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    tether = Tether(0, 3, heard.put)
    port = tether.hold()
    others: list[subprocess.Popen[str]] = []
    for rank, does in ((2, "stays"), (1, request.param)):
        command = [sys.executable, "-c", RANK, str(port), str(rank), does]
        others.insert(0, subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert said(others[0]) == "ready"
    yield heard, others, tether
    for other in others:
        other.kill()
        other.communicate()
    tether.let_go()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("star", ["stays"], indirect=True)
def test_rank_that_is_killed_is_heard_of_by_all_with_its_host(star: Star) -> None:
    heard, (second, third), _ = star
    second.kill()
    line = heard.get(timeout=SOON)
    assert (
        line
        == f"rank 1 of 3 on {socket.gethostname()} has ended without a word, or its host cannot be reached"
    )
    assert said(third) == line


@pytest.mark.parametrize("star", ["fails"], indirect=True)
def test_rank_that_fails_tells_all_why(star: Star) -> None:
    heard, (_, third), _ = star
    line = heard.get(timeout=SOON)
    assert line == f"rank 1 of 3 on {socket.gethostname()} failed: ValueError: boom"
    assert said(third) == line


@pytest.mark.parametrize("star", ["leaves"], indirect=True)
def test_rank_that_is_done_may_go_and_strangers_may_come(star: Star) -> None:
    heard, (second, _), tether = star
    second.kill()
    second.wait()
    server = tether._server
    assert server is not None
    with socket.create_connection(("127.0.0.1", server.getsockname()[1])) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n")
    with pytest.raises(queue.Empty):
        heard.get(timeout=QUIET)


@pytest.mark.parametrize("star", ["stays"], indirect=True)
def test_end_of_the_first_rank_is_heard_of_by_the_others(star: Star) -> None:
    _, others, tether = star
    while len(tether._links) < len(others):
        time.sleep(0.01)
    tether._over.set()  # from here on it says nothing
    for link in list(tether._links):
        link.shutdown(socket.SHUT_RDWR)  # as the system does for a process that dies
    assert all(said(other).startswith("rank 0 of 3 at 127.0.0.1 has ended, or its host") for other in others)


def test_word_of_one_who_does_not_know_the_secret_counts_for_nothing() -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    forged: queue.SimpleQueue[str] = queue.SimpleQueue()
    with mock.patch.dict(os.environ, {SECRET: "ours"}):
        first = Tether(0, 2, heard.put)
        port = first.hold()
        with mock.patch.dict(os.environ, {SECRET: "theirs"}):
            stranger = Tether(1, 2, forged.put)
            stranger.tie("127.0.0.1", port)
            assert forged.get(timeout=SOON)  # it is sent away
        stranger.let_go()
        assert not first._links
        with pytest.raises(queue.Empty):
            heard.get(timeout=QUIET)
        first.let_go()


# --- the way to the first rank ----------------------------------------------------------------------------------------


def test_first_rank_that_comes_later_is_waited_for() -> None:
    with listen(0) as server:
        port = server.getsockname()[1]
        reach("localhost", port, timedelta(seconds=SOON))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "no-such-host.invalid",
            "at no-such-host.invalid, port 9, within 0:00:01.*does not resolve there; set MASTER_ADDR",
        ),
        ("127.0.0.1", "nothing listens there; has the first process been started"),
    ],
)
def test_first_rank_that_cannot_be_reached_is_named_in_time(
    name: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaching, "_QUIET", 0.0)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=says):
        reach(name, 9, timedelta(seconds=1))
    assert time.monotonic() - start < 6
    assert capsys.readouterr().err.count("cannot reach the first process") == 1


def test_resolver_that_does_not_answer_is_not_waited_for() -> None:
    with (
        mock.patch.object(socket, "getaddrinfo", side_effect=lambda *_, **__: time.sleep(5)),
        pytest.raises(TimeoutError, match=r"no answer in 0\.1 s"),
    ):
        addresses_of("somewhere", 0.1)


def test_port_that_is_taken_is_named() -> None:
    with (
        listen(0) as server,
        pytest.raises(RankFailure, match=r"cannot be had: .*set MASTER_PORT to another one"),
    ):
        listen(server.getsockname()[1])


# --- the launcher of torchrun or srun ---------------------------------------------------------------------------------

CHILD = """
import os, sys, time
from shardwise.launch.rank import follow_parent
{follow}
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize(
    ("follow", "ends"), [("follow_parent()", True), ("", False)], ids=["follows", "control"]
)
def test_rank_of_another_launcher_ends_when_that_is_killed(follow: str, ends: bool) -> None:
    command = [sys.executable, "-c", PARENT, CHILD.format(follow=follow)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + (SOON if ends else 2)
    while there(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert there(child) != ends
    if not ends:
        os.kill(child, signal.SIGKILL)
    parent.stdout.close()


def there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
