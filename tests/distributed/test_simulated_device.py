"""The simulated accelerator sees what goes wrong on a device: each kind of fault is made here once, and is seen."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.pool import Pool


def _here() -> Any:
    """Return the devices, in a rank whose accelerator is the simulated one, with no fault made yet."""
    from tests import accelerator

    accelerator.faults.clear()
    torch.accelerator.synchronize()
    return accelerator


def run(ranks: Pool, function: Any) -> Any:
    """Return what one rank says; all are the same."""
    return ranks.run(function)[0]


def _memory() -> dict[str, Any]:
    sim = _here()
    index = torch.accelerator.current_device_index()
    device, before = sim.devices[index], torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.ones(100, device="sim")
    y = x[10:] * 2
    held, peak = (
        torch.accelerator.memory_allocated() - before,
        torch.accelerator.max_memory_allocated() - before,
    )
    free, total = torch.accelerator.get_memory_info(index)
    del x, y
    kinds = []
    with device.room_for(1000):
        for nbytes in (1000, 1001):
            try:
                torch.empty(nbytes, dtype=torch.uint8, device="sim")
            except torch.OutOfMemoryError as error:
                kinds.append(f"{nbytes}: {error}")
    return {
        "held": held,
        "peak": peak,
        "free": total - free - before,
        "left": torch.accelerator.memory_allocated() - before,
        "out": kinds,
        "fresh is NaN": bool(torch.empty(3, device="sim").isnan().all()),
    }


def test_memory_is_counted_and_bounded(device_ranks: Pool) -> None:
    found = run(device_ranks, _memory)
    assert found["out"] == [f"1001: {found['out'][0][6:]}"]
    assert "out of memory" in found["out"][0]
    assert found | {"out": []} == {
        "held": 760, "peak": 760, "free": 760, "left": 0, "out": [], "fresh is NaN": True,
    }  # fmt: skip


def _refused(function: Any) -> str:
    try:
        function()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


def _mixed() -> list[str]:
    sim = _here()
    x = torch.ones(2, 2, device="sim:1")
    calls = [
        x.numpy,
        lambda: x + torch.ones(2, 2),
        lambda: x + torch.ones(2, 2, device="sim:0"),
        lambda: nn.Linear(2, 2)(x),
        lambda: torch.cat([x, torch.ones(2, 2)]),
        lambda: torch.empty(1, device="sim:7"),
        lambda: dist.all_reduce(torch.ones(1)),
    ]
    fine = (
        x * torch.tensor(2.0),
        x[torch.tensor([0])],
        copy.deepcopy(x),
    )  # a number, and indices, may come from the CPU
    assert all(tensor.device == x.device for tensor in fine)
    assert not sim.faults
    return [_refused(call) for call in calls]


def test_tensor_on_the_wrong_device_is_refused(device_ranks: Pool) -> None:
    messages = run(device_ranks, _mixed)
    assert all(messages)
    assert ["same device" in message for message in messages] == [False, True, True, True, True, False, False]


def _copies() -> dict[str, Any]:
    sim = _here()
    pinned, stream = torch.ones(4).pin_memory(), torch.Stream("sim")
    there = torch.empty(4, device="sim")
    with stream:
        there.copy_(pinned, non_blocking=True)
    early = there.cpu()
    stream.synchronize()
    late = there.cpu()
    there.copy_(pinned, non_blocking=True)
    pinned.fill_(7)  # before the copy was waited for
    overwritten = there.cpu()
    back = torch.empty(4, pin_memory=True)
    back.copy_(there, non_blocking=True)
    unread, event = back.clone(), torch.accelerator.current_stream().record_event()
    event.synchronize()
    other = torch.Stream("sim")
    with stream:
        there.copy_(torch.full((4,), 3.0).pin_memory(), non_blocking=True)
    other.wait_stream(stream)
    with other:
        behind = there.clone()
    values = {
        "early": early,
        "late": late,
        "overwritten": overwritten,
        "unread": unread,
        "back": back,
        "behind": behind,
    }
    return {name: value.cpu().tolist() for name, value in values.items()} | {"faults": list(sim.faults)}


def test_copy_is_done_when_it_is_waited_for_and_not_before(device_ranks: Pool) -> None:
    found = run(device_ranks, _copies)
    assert all(value != value for name in ("early", "unread") for value in found[name])
    assert [found[name][0] for name in ("late", "overwritten", "back", "behind")] == [1, 7, 7, 3]
    assert found["faults"] == []


def _blocking() -> tuple[list[str], int]:
    sim = _here()
    before = sim.waits.copies
    torch.ones(4).to("sim")  # blocks, and was not asked for anything else
    torch.ones(4, 4).pin_memory().t().to("sim", non_blocking=True)
    torch.ones(4).to("sim", non_blocking=True)
    torch.empty(4).copy_(torch.ones(4, device="sim"), non_blocking=True)
    return list(sim.faults), sim.waits.copies - before


def test_copy_that_cannot_run_beside_other_work_is_a_fault(device_ranks: Pool) -> None:
    faults, waits = run(device_ranks, _blocking)
    assert waits == 4
    assert len(faults) == 3
    assert all("blocks" in fault for fault in faults)


def _freed(record: bool) -> list[str]:
    sim = _here()
    there, stream = torch.empty(4, device="sim"), torch.Stream("sim")
    if record:
        there.record_stream(stream)
    with stream:
        there.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    del there
    stream.synchronize()
    return list(sim.faults)


def test_memory_that_is_freed_with_a_copy_on_its_way_is_a_fault(device_ranks: Pool) -> None:
    (fault,) = device_ranks.run(_freed, False)[0]
    assert "freed" in fault
    assert device_ranks.run(_freed, True)[0] == []


def _drawn() -> bool:
    generator = torch.Generator("sim").manual_seed(3)
    drawn = torch.randn(4, generator=generator, device="sim")
    again = torch.randn(4, generator=torch.Generator("cpu").manual_seed(3))
    return generator.device.type == "sim" and torch.equal(drawn.cpu(), again)


def test_generators_draw_on_the_device(device_ranks: Pool) -> None:
    assert run(device_ranks, _drawn)


def _trained() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(18, 2))
    there, x = copy.deepcopy(model).to("sim:0"), torch.randn(4, 2, 8)
    kept = there[0].weight
    model(x).square().sum().backward()
    there(x.to("sim:0")).square().sum().backward()
    assert kept is there[0].weight
    pairs = zip(model.parameters(), there.parameters(), strict=True)
    return max((p.grad - q.grad.cpu()).abs().max().item() for p, q in pairs)


def test_gradients_are_those_of_the_cpu(device_ranks: Pool) -> None:
    assert device_ranks.run(_trained)[0] < 1e-5
