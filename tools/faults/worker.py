"""`shardwise generate` with a fault in it, which the environment describes: `FAULT="RANK PHASE ACT STAMP"`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.faults import cut_the_link, fault

from shardwise.generate import command


def _raise() -> None:
    raise ValueError("made to fail")


def _lose_the_host() -> None:
    """End everything on this host, without a word to the others."""
    cut_the_link()
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _let_a_stranger_write() -> None:
    """Have another user of this machine write to the store what rank 1 would say next."""
    code = (
        "import json, os; from torch._C._distributed_c10d import TCPStore\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"store = TCPStore('127.0.0.1', {os.environ['MASTER_PORT']}, is_master=False, wait_for_workers=False)\n"
        "ours = [key.split('/') for key in store.list_keys() if key.startswith('0//shardwise/1/')]\n"
        "turn = max(int(parts[4]) for parts in ours if parts[4].isdecimal() and parts[5] == '1')\n"
        "for i in range(turn + 1, turn + 9): store.set(f'0//shardwise/1/{i}/1', json.dumps([[None, {}, 'x'], 'h']))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


ACTS: Mapping[str, Callable[[], object]] = {
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": _raise,
    "exits with 0": lambda: os._exit(0),
    "stranger": _let_a_stranger_write,
    "link": cut_the_link,
    "host": _lose_the_host,
}


def generate(request: Any) -> list[str]:
    """Draw as the command's own worker does, with a fault on one rank."""
    from shardwise.generate import worker

    rank, phase, act, stamp = os.environ["FAULT"].split("|")

    def fail() -> None:
        Path(stamp).write_text(str(time.time()))
        ACTS[act]()

    with fault(phase, fail) if rank == os.environ["RANK"] else nullcontext():
        return worker.generate(request)


def main() -> None:
    """Be the command."""
    command.WORKER = "tools.faults.worker:generate"
    command.generate()


if __name__ == "__main__":
    main()
