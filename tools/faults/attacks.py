"""What other machines, other jobs, other process groups and other users do to a job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from PIL import Image
from tests.distributed.test_disagreement import OTHER_COPIES
from tests.faults import outcome
from tests.whole_pipelines import embedded_copy
from tools.faults.ranks import Row, command, environment, run, said

from shardwise import DiffusionPipeline, ParallelConfig, TensorParallelConfig, demo_model_path
from shardwise.generate.output import write_png
from shardwise.launch import run_ranks
from shardwise.runtime.group import TensorParallelGroup

PICTURES = 100


def attacks() -> Iterator[Row]:
    """Yield what came of each."""
    yield from _other_copies()
    yield {"attack": f"two jobs write {PICTURES} pictures each of one name", "came": _race()}
    yield {"attack": "a second process group in the store of the first", "came": _second_group()}
    yield {"attack": "another user writes to the store", "came": _stranger()}


def _other_copies() -> Iterator[Row]:
    for part, (_, change) in OTHER_COPIES.items():
        with TemporaryDirectory() as name:
            copy = embedded_copy(Path(name) / "copy")
            change(copy)
            heard = run_ranks(load, 2, [str(demo_model_path()), str(copy)], device="cpu")
        same = "the same" if heard[0] == heard[1] else "another"
        yield {"attack": f"rank 1 has another {part}", "came": f"{heard[0]}; rank 1 says {same}"}


def load(folders: list[str]) -> str:
    """Load this rank's folder, and return what came of it in one line."""
    config = ParallelConfig(tp=2)
    folder = folders[dist.get_rank()]
    text, _ = outcome(lambda: DiffusionPipeline.from_pretrained(folder, parallel_config=config))
    return " ".join(text.split(folders[0])[-1].replace("RankFailure: ", "").split())[:220]


def _race() -> str:
    with TemporaryDirectory() as name:
        jobs = [get_context("spawn").Process(target=write, args=(name, job)) for job in range(2)]
        for process in jobs:
            process.start()
        for process in jobs:
            process.join()
        files = list(Path(name).iterdir())
        readable = sum(1 for file in files if Image.open(file).load())
    codes = [process.exitcode for process in jobs]
    return f"exit codes {codes}; {len(files)} files, {readable} of them whole pictures"


def write(folder: str, job: int) -> None:
    """Write pictures of one name."""
    for i in range(PICTURES):
        picture = Image.new("RGB", (64, 64), (200 * job, i, 0))
        write_png(picture, Path(folder), "seed-0", {"shardwise": "", "prompt": "p"})


def _second_group() -> str:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with TemporaryDirectory() as name:
        env = environment(0, "none", "none", Path(name) / "stamp")
        done = run([*torchrun, "-m", "tools.faults.attacks"], env, Path(name))
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    return "; ".join(sorted(lines)) or done.stderr[-200:]


def groups() -> None:
    """Be in two process groups, one after another, with a slow rank in the second; print what was heard in it."""
    for number in range(2):
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        group = TensorParallelGroup.of(TensorParallelConfig(dist.get_world_size()))
        wrong = 0
        for turn in range(3):
            if number and group.rank == 1:
                time.sleep(0.5)
            heard = group.exchange([number, turn])
            wrong += heard != [[number, turn]] * 2
        dist.barrier()
        dist.destroy_process_group()
    print(f"rank {os.environ['RANK']} heard {wrong} of 3 words of the first group in the second", flush=True)


def _stranger() -> str:
    with TemporaryDirectory() as name:
        folder = Path(name)
        done = run(command(folder / "out"), environment(1, "decoding", "stranger", folder / "stamp"), folder)
    return f"exit code {done.returncode}: {said(done.stderr)}"


if __name__ == "__main__":
    groups()
