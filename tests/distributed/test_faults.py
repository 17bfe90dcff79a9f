"""A rank, a host or a link that is lost in any phase of `generate`: all other ranks end soon, and say who it was."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from PIL import Image

from shardwise.demo import CALL
from shardwise.generate import worker
from shardwise.generate.request import Request
from shardwise.launch.group import naming_who_is_missing
from tests import hosts
from tests.faults import cut_the_link, fault, outcome, stop
from tests.hosts import Host
from tests.pool import Pool
from tests.whole_pipelines import embedded_copy

PATIENCE = 5.0
"""Seconds that a rank waits; ranks of which none is lost are never that far apart on a machine with other work."""
ROLL_CALL = timedelta(seconds=1)
SAMPLE = ("denoising", "writing")
"""Of the phases, in every run; `make faults` goes through all of them."""
LIMIT = 30.0
"""Seconds in which every rank has ended, whatever was lost."""

_NAMES = "RankFailure: (no word came from )?"

ACTS: Mapping[str, Callable[[], None]] = {
    "stop": partial(stop, PATIENCE + 3),
    "cut": cut_the_link,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def _request(out: Path, ranks: int = 2, model: Path | None = None) -> Request:
    others = {name: value for name, value in CALL.items() if name != "num_inference_steps"}
    return Request(
        str(model or "embedded"),
        ("a red circle",),
        tp=2,
        cfg=ranks // 2,
        steps=3,
        out=str(out),
        arguments=others if model else {},
        timeout=PATIENCE * ranks / 2,
        load_timeout=PATIENCE * ranks / 2,
    )


def _drawn(request: Request, ranks: list[int], phase: str, act: str) -> tuple[str, float]:
    """Draw, with a fault on some ranks; return what came of it, and when."""
    mine = dist.get_rank() in ranks
    faulty = fault(phase, ACTS[act]) if mine else nullcontext()
    with faulty, mock.patch("shardwise.launch.group.ROLL_CALL", ROLL_CALL):
        said, _ = outcome(lambda: naming_who_is_missing()(worker.generate)(request))
    return said, time.time()


@contextmanager
def fresh(size: int, hosts: list[Host] | None = None) -> Iterator[Pool]:
    """Ranks that are not used again: a fault leaves them out of step."""
    pool = Pool(size, hosts=hosts or ())
    try:
        yield pool
    finally:
        pool.stop()


@pytest.mark.parametrize("phase", SAMPLE)
def test_rank_that_is_stopped_in_any_phase_is_named_by_the_other(tmp_path: Path, phase: str) -> None:
    request = _request(tmp_path / "out")
    with fresh(2) as ranks:
        start = time.time()
        (first, ended), (second, _) = ranks.run(_drawn, request, [1], phase, "stop")
    assert ended - start < LIMIT
    assert re.match(_NAMES + r"rank 1 of 2 \(global rank 1\)", first), first
    assert "Error" in second or "RankFailure" in second  # it does not go on alone


# --- several hosts ----------------------------------------------------------------------------------------------------

needs_hosts = pytest.mark.skipif(not hosts.allowed(), reason="network namespaces cannot be made here")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Where every host calls its copy of the model."""
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.fixture
def two_hosts(tmp_path: Path, model: Path) -> Iterator[list[Host]]:
    """Two hosts, each with its own copy of the model and its own output folder."""
    with hosts.hosts(2, tmp_path, partial(_own_folders, tmp_path, model)) as made:
        yield made


@pytest.fixture
def four_hosts(tmp_path: Path, model: Path) -> Iterator[list[Host]]:
    """Four of them."""
    with hosts.hosts(4, tmp_path, partial(_own_folders, tmp_path, model)) as made:
        yield made


def _own_folders(folder: Path, model: Path, number: int) -> Mapping[Path, Path]:
    """Return what a host has of its own: a copy of the model, and a folder for pictures."""
    out, own = folder / "out", folder / f"host-{number}"
    out.mkdir(exist_ok=True)
    embedded_copy(own / "model")
    (own / "out").mkdir()
    return {model: own / "model", out: own / "out"}


def _pictures(folder: Path, number: int) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / f"host-{number}" / "out").iterdir()}


def _generate(request: Request) -> tuple[str, float]:
    return outcome(lambda: worker.generate(request))


@needs_hosts
def test_hosts_with_a_copy_each_draw_the_picture_of_one_host(
    two_ranks: Pool, two_hosts: list[Host], tmp_path: Path, model: Path
) -> None:
    with fresh(2, two_hosts) as ranks:
        said = {said for said, _ in ranks.run(_generate, _request(tmp_path / "out", model=model))}
    assert said == {str([str(tmp_path / "out" / "seed-0.png")])}
    assert not _pictures(tmp_path, 1)  # the first rank's host has it
    two_ranks.run(_generate, _request(tmp_path / "here"))
    with (
        Image.open(tmp_path / "here" / "seed-0.png") as here,
        Image.open(tmp_path / "host-0" / "out" / "seed-0.png") as there,
    ):
        assert here.tobytes() == there.tobytes()


@needs_hosts
def test_host_with_another_copy_is_named_before_a_weight_is_read(
    two_hosts: list[Host], tmp_path: Path, model: Path
) -> None:
    file = tmp_path / "host-1" / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-64] + bytes(64))
    with fresh(2, two_hosts) as ranks:
        for said, _ in ranks.run(_generate, _request(tmp_path / "out", model=model)):
            assert "the ranks read different copies of the model" in said
            assert "vae/diffusion_pytorch_model.safetensors: rank 0: " in said


@needs_hosts
@pytest.mark.parametrize("phase", ["reading", "denoising"])
def test_link_that_is_lost_ends_the_ranks_on_both_hosts(
    two_hosts: list[Host], tmp_path: Path, model: Path, phase: str
) -> None:
    with fresh(2, two_hosts) as ranks:
        start = time.time()
        (first, ended), (second, too) = ranks.run(
            _drawn, _request(tmp_path / "out", model=model), [1], phase, "cut"
        )
    assert max(ended, too) - start < LIMIT
    assert re.match(_NAMES + r"rank 1 of 2 \(global rank 1, host host-b\)", first), first
    assert second.startswith(f"StoreLost: the store of the process group at {two_hosts[0].address}"), second


@needs_hosts
def test_hosts_that_are_lost_end_the_ranks_on_all_others(
    four_hosts: list[Host], tmp_path: Path, model: Path
) -> None:
    with fresh(4, four_hosts) as ranks:
        start = time.time()
        said = ranks.run(_drawn, _request(tmp_path / "out", ranks=4, model=model), [3], "denoising", "cut")
    assert max(ended for _, ended in said) - start < LIMIT
    for text, _ in said[:3]:
        assert re.match(r"(RankFailure|UnequalInputs)[\s\S]*host host-d", text), text
    assert said[3][0].startswith("StoreLost"), said[3]
