"""What processes do that stand in for those of a cluster: run as a program, it runs one of these functions on ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from shardwise.launch import init_ranks, run_ranks


def summed() -> list[Any]:
    """Return this rank's number, the sum of ones over all, its number on its machine, and its process."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return [dist.get_rank(), int(total), os.environ["LOCAL_RANK"], os.getpid()]


def killed() -> None:
    """Let the last rank be killed while no other waits for it, as in a load."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def script(does: str) -> None:
    """Join the ranks as a script of one's own does, sum up, and end in peace or, on the last rank, by an error."""
    import torch
    import torch.distributed as dist

    rank, ranks = init_ranks("cpu")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(rank, ranks, int(total), flush=True)
    if does == "fails":
        if rank == ranks - 1:
            raise ValueError("boom")
        time.sleep(100)


def main(name: str, ranks: str, calls: str) -> None:
    """Run a function on ranks, some times, and print what each returned, and whether this process was that rank."""
    for _ in range(int(calls)):
        results = run_ranks(globals()[name], int(ranks), device="cpu")
        print([result and [*result[:3], result[3] == os.getpid()] for result in results], flush=True)


if __name__ == "__main__":
    script(sys.argv[2]) if sys.argv[1] == "script" else main(*sys.argv[1:])
