"""The store that agreements use: no call outlasts its time, and no word is taken that is not of the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, TCPStore

from shardwise.errors import RankFailure
from shardwise.runtime import store as module
from shardwise.runtime.seal import opened, sealed
from shardwise.runtime.store import Store, StoreLost

SECOND = timedelta(seconds=1)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[tuple[TCPStore, int]]:
    """A store that another process keeps, and that process."""
    code = (
        "import sys, time; from torch._C._distributed_c10d import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield TCPStore("127.0.0.1", int(process.stdout.readline()), is_master=False), process.pid
    process.kill()
    process.communicate()


def test_words_are_plain_data_by_key(tmp_path: Path) -> None:
    store = Store(FileStore(str(tmp_path / "store"), 1))
    store.post("a", [1, {"b": None}])
    assert store.read("a", SECOND) == store.glance("a") == [1, {"b": None}]
    assert store.glance("c") is None
    assert [store.count("n"), store.count("n")] == [1, 2]
    with pytest.raises(TimeoutError):
        store.read("c", timedelta(milliseconds=50))


def test_call_of_a_store_that_is_stopped_ends_by_our_own_clock(
    kept: tuple[TCPStore, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLACK", timedelta(seconds=0.5))
    store = Store(kept[0])
    store.post("a", 1)
    os.kill(kept[1], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(StoreLost, match=r"did not answer within 1.5 s: its host cannot be reached"):
        store.read("b", SECOND)
    assert time.monotonic() - start < 3
    start = time.monotonic()
    with pytest.raises(StoreLost):  # and those after it do not wait at all
        store.read("a", SECOND)
    assert time.monotonic() - start < 0.2


def test_store_of_torch_alone_would_wait_on(kept: tuple[TCPStore, int]) -> None:
    os.kill(kept[1], signal.SIGSTOP)
    waiting = threading.Thread(target=_wait, args=(kept[0],), daemon=True)
    waiting.start()
    waiting.join(4)
    assert waiting.is_alive()
    os.kill(kept[1], signal.SIGCONT)
    waiting.join(10)


def _wait(store: TCPStore) -> None:
    with pytest.raises(RuntimeError):
        store.wait(["nothing"], timedelta(seconds=1))


def test_word_of_somebody_else_is_an_error(tmp_path: Path) -> None:
    plain = FileStore(str(tmp_path / "store"), 1)
    ours, others = (Store(plain, secret=secret) for secret in (b"known", b"guessed"))
    ours.post("a", "word")
    assert ours.read("a", SECOND) == "word"
    others.post("a", "forged")
    with pytest.raises(RankFailure, match=r"the word shardwise/a .* is of nobody who belongs to this job"):
        ours.read("a", SECOND)
    plain.set("shardwise/a", '"forged"')
    with pytest.raises(RankFailure, match="of nobody"):
        ours.glance("a")


def test_seal_is_of_one_key_and_one_text() -> None:
    word = sealed("a", "text", b"secret")
    assert opened("a", word, b"secret") == "text"
    assert opened("b", word, b"secret") is None  # a word that was moved
    assert opened("a", word + "!", b"secret") is None
    assert opened("a", word, b"other") is None
    assert opened("a", "text", b"secret") is None
    assert opened("a", sealed("a", "text", b""), b"") == "text"


def test_thread_ends_with_its_store(tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in range(5):
        Store(FileStore(str(tmp_path / "store"), 1)).post("a", 1)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
