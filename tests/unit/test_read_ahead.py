"""Read-ahead: the ranks of a node share out what they need, stay in a window ahead of the readers, and never fail."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import ahead, read
from shardwise.checkpoint.ahead import STEP, STRIPE, ReadAhead, is_cold, stripes, window_for
from shardwise.checkpoint.read import SliceReader
from shardwise.checkpoint.read_plan import Place, Read, Wanted
from shardwise.plan.layout import Replicated
from tests.unit.test_read import CPU, random_tensor, same, store

A, B = Path("a"), Path("b")
RANGES = [(A, 100, 100 + 3 * STRIPE), (A, 9 * STRIPE, 9 * STRIPE + 10), (B, 8, STRIPE // 2)]
ALL = 3 * STRIPE + 10 + STRIPE // 2 - 8


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_stripes_of_all_ranks_are_every_byte_once_in_file_order(ranks: int) -> None:
    own = [list(stripes(RANGES, place, ranks)) for place in range(ranks)]
    together = sorted((s for mine in own for s in mine), key=lambda s: s.before)
    assert sum(s.end - s.start for s in together) == ALL
    assert [s.before for s in together] == [0, STRIPE, 2 * STRIPE, 3 * STRIPE, 3 * STRIPE + 10]
    assert [(s.file, s.start) for s in together] == sorted((s.file, s.start) for s in together)
    assert max(len(mine) for mine in own) - min(len(mine) for mine in own) <= 1


class Advice:
    """Records what is asked for; raises or waits where it is told to."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.asked: list[tuple[int, int]] = []
        self.then = then

    def __call__(self, descriptor: int, start: int, length: int) -> None:
        self.asked.append((start, length))
        self.then()

    def settled(self) -> int:
        """Return the bytes asked for, once nothing has been added for a while."""
        known = -1
        while known != len(self.asked):
            known = len(self.asked)
            time.sleep(0.05)
        return sum(length for _, length in self.asked)


def a_read(file: Path, offset: int) -> Read:
    return Read(file, offset, ((0, 1),), (Place("x", 0, 1),))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"\0")
    return tmp_path / "file"


def test_read_ahead_stays_in_its_window_and_moves_with_the_readers(file: Path) -> None:
    advice = Advice()
    with ReadAhead([(file, 0, 40 * STRIPE)], 0, 2, 4 * STRIPE, advice) as running:
        assert advice.settled() == 2 * STRIPE  # every second stripe of the four in front
        running.reached(a_read(file, 10 * STRIPE))
        assert advice.settled() == 4 * STRIPE
        assert min(start for start, _ in advice.asked[2 * STRIPE // STEP :]) == 10 * STRIPE
    assert all(length <= STEP for _, length in advice.asked)
    assert running._thread.is_alive() is False


def test_read_ahead_ends_when_all_is_asked_for(file: Path) -> None:
    advice = Advice()
    with ReadAhead([(file, 5, 3 * STRIPE)], 0, 1, 100 * STRIPE, advice):
        assert advice.settled() == 3 * STRIPE - 5


def test_read_ahead_stops_with_the_readers(file: Path) -> None:
    go_on = threading.Event()
    advice = Advice(lambda: go_on.wait(5) and None)
    with ReadAhead([(file, 0, 40 * STRIPE)], 0, 1, 100 * STRIPE, advice) as running:
        while not advice.asked:
            time.sleep(0.01)
        running._stopped = True
        go_on.set()
    assert len(advice.asked) == 1


@pytest.mark.parametrize("error", [OSError(errno.EIO, "disk"), AttributeError("no such call")])
def test_failing_read_ahead_is_ignored(file: Path, error: Exception) -> None:
    def fail() -> None:
        raise error

    advice = Advice(fail)
    with ReadAhead([(file, 0, 40 * STRIPE)], 0, 1, 100 * STRIPE, advice) as running:
        running.reached(a_read(file, STRIPE))
        assert advice.settled() == STEP


def test_file_that_is_gone_does_not_matter_to_the_read_ahead(tmp_path: Path) -> None:
    with ReadAhead([(tmp_path / "gone", 0, STRIPE)], 0, 1, STRIPE) as running:
        running._thread.join(5)
        assert not running._thread.is_alive()


# ---------------------------------------------------------------- warm or cold


def probe(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], int]) -> list[int]:
    offsets: list[int] = []

    def preadv(descriptor: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        assert flags == os.RWF_NOWAIT
        assert len(buffers[0]) == 1
        offsets.append(offset)
        return answer(len(offsets))

    monkeypatch.setattr(os, "preadv", preadv)
    return offsets


def missing(number: int, after: int) -> int:
    if number > after:
        raise OSError(errno.EAGAIN, "not in memory")
    return 1


READS = [a_read(A, i) for i in range(1000)]


def test_files_are_warm_if_all_probes_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = probe(monkeypatch, lambda number: 1)
    assert not is_cold(READS, lambda file: 3)
    assert len(offsets) in range(ahead.PROBES, ahead.PROBES + 2)
    assert offsets[0] < 100
    assert offsets[-1] > 900


@pytest.mark.parametrize("after", [0, 5])
def test_files_are_cold_if_one_probe_is_not_in_memory(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    probe(monkeypatch, lambda number: missing(number, after))
    assert is_cold(READS, lambda file: 3)


def test_files_count_as_cold_where_the_system_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert is_cold(READS, lambda file: 3)


def test_files_that_were_dropped_from_the_cache_are_cold(tmp_path: Path) -> None:
    """With the system's own answers; a file system that cannot tell says cold both times."""
    entry = store(tmp_path, x=random_tensor((4_000_000,)))["x"]
    wanted = {"x": Wanted(entry, Replicated(), torch.float32)}
    descriptor = os.open(entry.file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    tensors, report = SliceReader(0, 1, CPU).read(wanted)
    assert report.cold
    assert same(tensors["x"], random_tensor((4_000_000,)))


@pytest.mark.parametrize("cold", [True, False])
def test_cold_files_are_read_ahead_by_the_ranks_of_the_node_and_warm_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    started: list[tuple[object, ...]] = []

    class Noted(ReadAhead):
        def __init__(self, *args: object) -> None:
            started.append(args)
            super().__init__(*args, Advice())

    monkeypatch.setattr(read, "is_cold", lambda reads, descriptor: cold)
    monkeypatch.setattr(read, "ReadAhead", Noted)
    entry = store(tmp_path, x=random_tensor((640,)))["x"]
    reader = SliceReader(6, 8, CPU, neighbours=(4, 6, 7))
    _, report = reader.read({"x": Wanted(entry, Replicated(), torch.float32)})
    assert report.cold == cold
    assert [args[:3] for args in started] == [
        ([(entry.file, entry.offset, entry.offset + 2560)], 1, 3)
    ] * cold


def test_window_is_a_share_of_the_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "MemTotal: 9 kB\nMemAvailable:   2097152 kB\n")
    assert window_for(4) == 2**31 // 40
    monkeypatch.setattr(Path, "read_text", lambda self: "MemAvailable: 1000000000 kB\n")
    assert window_for(4) == ahead.WINDOW
    monkeypatch.setattr(Path, "read_text", lambda self: "")
    assert 0 < window_for(4) < ahead.WINDOW
