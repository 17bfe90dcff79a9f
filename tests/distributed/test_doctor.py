"""`shardwise doctor`: each fault is simulated on the second of two ranks, and comes out with its host and a fix."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from shardwise import TensorParallelConfig, demo_model_path
from shardwise.cli import main
from shardwise.doctor import command, facts, links, network
from shardwise.doctor.checks import GIB
from shardwise.doctor.worker import examine
from shardwise.errors import RankFailure
from shardwise.runtime.group import TensorParallelGroup
from tests.pool import Pool

GPU = {"name": "cuda:0", "model": "H200", "uuid": "GPU-1", "free": 100 * GIB, "total": 140 * GIB}


def _stand_in(module: Any, name: str, value: Any) -> Any:
    return mock.patch.object(module, name, return_value=value)


def _fault(name: str) -> list[Any]:
    """Return the patches that make up a fault, on the rank that has it; some are on both."""
    second, host = dist.get_rank() == 1, socket.gethostname()
    there = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"]}
    own = {"there": there, "by_name": ["lo"], "asked": {"GLOO": None, "NCCL": None}}
    apart = mock.patch.object(TensorParallelGroup, "node", property(lambda _: [f"host{dist.get_rank()}", ""]))
    both = {
        "one device": [_stand_in(facts, "device", GPU)],
        "little /dev/shm": [
            _stand_in(facts, "device", GPU | {"uuid": f"GPU-{dist.get_rank()}"}),
            _stand_in(facts, "free", 2**26),
        ],
        "loopback": [
            apart,
            _stand_in(network, "names", {host: ["127.0.1.1"]}),
            _stand_in(network, "interfaces", own),
        ],
    }
    only = {
        "version": [_stand_in(facts, "versions", facts.versions() | {"torch": "2.12.0"})],
        "name": [_stand_in(network, "names", {"gone": "Name or service not known"})],
        "interface": [
            _stand_in(network, "interfaces", own | {"asked": {"GLOO": "ib7", "NCCL": "=eth0,^docker,eth9"}})
        ],
        "kind of device": [_stand_in(facts, "device", GPU)],
        "memory": [apart, _stand_in(facts, "available", 2**20)],
        "memory of a device": [_stand_in(facts, "device", GPU | {"free": 2**20})],
        "disk": [apart, _stand_in(facts, "free", 2**20)],
        "cores": [apart, _stand_in(facts, "cores", 0)],
    }
    return both.get(name) or (
        only.get(name, []) if second else [apart] if name in ("memory", "disk", "cores") else []
    )


def _examined(fault: str, model: str | None = None, other: str | None = None) -> dict[str, Any]:
    with ExitStack() as stack:
        for patch in _fault(fault):
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(links, "SIZES", (1,)))
        return examine(other if other is not None and dist.get_rank() == 1 else model)


def _problems(report: dict[str, Any]) -> dict[str, list[str]]:
    return {check["name"]: check["problems"] for check in report["checks"] if check["problems"]}


@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [
        ("version", "versions", "torch differs .*2.12.0: {host} \\(rank 1\\)\\): install the same"),
        ("name", "names", "{host} \\(rank 1\\): the name gone does not resolve .*: add it to /etc/hosts"),
        (
            "interface",
            "interfaces",
            "{host} \\(rank 1\\): GLOO_SOCKET_IFNAME is 'ib7'.* set it to one of lo, eth0",
        ),
        (
            "loopback",
            "interfaces",
            "{host} \\(rank 1\\): its own name leads to 127.0.1.1.* set GLOO_SOCKET_IFNAME",
        ),
        ("kind of device", "devices", "different kinds .*cuda:0: {host} \\(rank 1\\)\\): say --device"),
        ("one device", "devices", "{host}: 2 ranks use one device \\(GPU-1\\)"),
        ("little /dev/shm", "disk", "{host}: 64 MiB are free in /dev/shm.*--shm-size=1g"),
        ("memory", "memory", "{host}: 0.0 GiB of memory are left, and 1 rank need 1.0 GiB at least"),
        ("memory of a device", "memory", "{host} \\(rank 1\\): 0.0 GiB of cuda:0 are free"),
        ("disk", "disk", "{host}: 0.0 GiB are free for the temporary folder: .* TMPDIR"),
        ("cores", "cores", "{host}: 1 rank have 0 cores: start fewer"),
    ],
)
def test_fault_of_one_rank_is_named_with_its_host_and_a_fix(
    two_ranks: Pool, fault: str, check: str, says: str
) -> None:
    reports = two_ranks.run(_examined, fault)
    assert _problems(reports[0]) == _problems(reports[1])
    found = _problems(reports[0])[check]
    with pytest.raises(AssertionError, match=says.format(host=socket.gethostname())):
        raise AssertionError("\n".join(found))


def test_healthy_ranks_have_no_problem_and_sums_are_measured(two_ranks: Pool) -> None:
    first, second = two_ranks.run(_examined, "none", str(demo_model_path()))
    assert _problems(first) == {}
    assert [check["name"] for check in first["checks"]] == [
        "ranks", "names", "interfaces", "versions", "devices", "memory", "disk", "cores", "model",
    ]  # fmt: skip
    assert [link["mib"] for link in first["links"]] == [1]
    assert first["links"] == second["links"]
    assert first["links"][0]["mib_per_second"] > 0
    assert json.loads(json.dumps(first)) == first


def test_copies_that_differ_or_lack_a_file_are_named_with_the_host(two_ranks: Pool, tmp_path: Path) -> None:
    ours, other = demo_model_path(), tmp_path / "other"
    shutil.copytree(ours, other)
    report = two_ranks.run(_examined, "none", str(ours), str(other))[0]
    assert _problems(report) == {}
    (other / "scheduler" / "scheduler_config.json").write_text("{}")
    (other / "model_index.json").unlink()
    (lacks, differ) = _problems(two_ranks.run(_examined, "none", str(ours), str(other))[0])["model"]
    host = socket.gethostname()
    assert lacks == f"{host} (rank 1): {other} lacks model_index.json: copy them there".replace(
        str(other), str(ours)
    )
    assert "read different copies of the model" in differ
    assert "scheduler/scheduler_config.json: rank 0: " in differ
    assert f"({host} (rank 0), {host} (rank 1))" in differ
    (gone,) = _problems(two_ranks.run(_examined, "none", str(ours), str(tmp_path / "none"))[0])["model"]
    assert gone.startswith(f"{host} (rank 1): there is no folder")


def _slow() -> list[dict[str, Any]]:
    group = TensorParallelGroup.of(TensorParallelConfig(2))
    asked: list[int] = []

    def take(group: TensorParallelGroup, mib: int) -> float:
        asked.append(mib)
        return 0.2 * mib * (1 + group.rank)

    with mock.patch.object(links, "_seconds", take):
        found = links.measured(group)
    assert 64 not in asked
    return found


def test_sizes_that_would_take_too_long_are_left_out_on_all_ranks(two_ranks: Pool) -> None:
    first, second = two_ranks.run(_slow)
    assert first == second
    assert [(link["mib"], link["seconds"]) for link in first] == [(1, 0.4), (16, None), (64, None)]


# --- the command ------------------------------------------------------------------------------------------------------


@contextmanager
def _starting(outcome: Any) -> Iterator[mock.Mock]:
    with mock.patch.object(command, "run_ranks", side_effect=outcome) as started:
        yield started


def _report(*problems: str) -> dict[str, Any]:
    link = {"mib": 1, "seconds": 0.002, "mib_per_second": 500.0}
    checks = [{"name": "names", "says": "all well", "problems": list(problems)}]
    return {"ranks": [{}, {}], "checks": checks, "links": [link, link | {"seconds": None}], "seconds": 1.0}


@pytest.mark.parametrize(
    ("problems", "code", "shown"), [((), 0, "all well"), (("a: b is wrong",), 1, "a: b is wrong")]
)
def test_report_is_a_table_or_json_and_the_exit_code_says_whether_all_is_well(
    problems: tuple[str, ...], code: int, shown: str
) -> None:
    with _starting(lambda *_, **__: [_report(*problems), None]):
        table = CliRunner().invoke(main, ["doctor", "--device", "cpu"])
        plain = CliRunner().invoke(main, ["doctor", "--json", "--tp", "2"])
    assert (table.exit_code, plain.exit_code) == (code, code)
    assert shown in table.output
    assert "500" in table.output
    assert "too slow" in table.output
    assert json.loads(plain.output) == _report(*problems)


def test_ranks_that_do_not_meet_are_a_finding() -> None:
    with _starting(RankFailure("rank 1 of 2 did not start within 0:00:15")):
        result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "rank 1 of 2 did not start" in result.output


def test_name_of_the_first_machine_is_looked_up_before_ranks_wait_for_it() -> None:
    pod = {"LWS_LEADER_ADDRESS": "no-such-host.invalid", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    with mock.patch.dict(os.environ, pod), _starting(None) as started:
        result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 1
    assert not started.called
    (check,) = json.loads(result.output)["checks"]
    assert (
        f"{socket.gethostname()} (process 1 of LeaderWorkerSet): the name no-such-host.invalid"
        in " ".join(check["problems"])
    )


def test_variables_that_cannot_be_meant_are_a_wrong_question() -> None:
    with mock.patch.dict(os.environ, {"LWS_GROUP_SIZE": "2"}):
        result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 2
    assert "LWS_WORKER_INDEX is not set" in result.output
