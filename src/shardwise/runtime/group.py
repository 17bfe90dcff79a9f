"""The ranks that share one model, and the only place that calls collectives.

A `TensorParallelGroup` knows its members, this rank's coordinate among them, and its device. Tensor
collectives run on the group the user made (NCCL, gloo, ...), agreements about errors through that group's store.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.config import TensorParallelConfig
from shardwise.errors import GroupError, RankFailure
from shardwise.runtime.agreement import PATIENCE, Step, Words, at_most, compare_claims, raise_failure
from shardwise.runtime.devices import current_device, device_type_of, identity, may_share
from shardwise.runtime.hosts import tell_crossing


@dataclass
class Traffic:
    """What a group has sent so far: numbers of collectives, and the bytes one rank put into them."""

    all_reduces: int = 0
    all_reduce_bytes: int = 0


@dataclass(frozen=True)
class Entered:
    """A whole tensor that layers of slices are given in a row, as it was, and the copy that all of them read."""

    tensor: Tensor
    version: int
    copy: Tensor


class TensorParallelGroup:
    """The ranks over which one model is sharded.

    Attributes:
        degree: Number of ranks.
        rank: This process's coordinate among them, 0 to degree - 1. It decides which slice is local, and
            differs from the global rank as soon as the group is part of a larger world.
        members: The global ranks, by coordinate.
        device: Where this rank's slices live.
        traffic: Counters of the collectives issued in eager mode.
        entered: What the last layers of slices were given, until their slices end; only while a gradient is needed.
    """

    entered: Entered | None = None

    def __init__(self, process_group: dist.ProcessGroup, members: list[int], device: torch.device) -> None:
        self.process_group = process_group
        self.members = members
        self.rank = members.index(dist.get_rank())
        self.degree = len(members)
        self.device = device
        self.traffic = Traffic()

    @classmethod
    def of(cls, config: TensorParallelConfig) -> TensorParallelGroup:
        """Return the group that `config` means, as seen by this process; `check` tells whether it fits.

        Raises:
            GroupError: there is no process group, or this process is not in the mesh.
        """
        if not is_initialized():
            raise GroupError(
                f"tp_degree {config.tp_degree} needs a process group: start the script with "
                "`torchrun --nproc-per-node N script.py`, or srun, and call `shardwise.init_ranks()` first"
            )
        if config.mesh is not None:
            process_group, members, device_type = _mesh_group(config.mesh)
        else:
            process_group, members, device_type = _world_group()
        return cls(process_group, members, current_device(device_type))

    def check(self, config: TensorParallelConfig) -> None:
        """Check that the group has as many ranks as `config` asks for.

        Raises:
            GroupError: it has more or fewer.
        """
        if config.tp_degree == self.degree:
            return
        hint = f"start {config.tp_degree} processes"
        if config.tp_degree < self.degree:
            hint = (
                "say which ranks share the model with mesh=init_device_mesh(device_type, (n, tp), "
                'mesh_dim_names=("dp", "tp"))["tp"]'
            )
        raise GroupError(
            f"tp_degree is {config.tp_degree}, but the process group has {self.degree} ranks: {hint}"
        )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the ranks; in eager mode it is written into `tensor` itself.

        Not differentiable: see `runtime.collectives` for the forms that are.
        """
        tensor = tensor.contiguous()
        if torch.compiler.is_compiling():
            # Dynamo traces the functional form; in eager it costs 4 to 6 times the host time.
            ops = torch.ops._c10d_functional
            return cast(Tensor, ops.wait_tensor(ops.all_reduce(tensor, "sum", self.process_group.group_name)))
        self.traffic.all_reduces += 1
        self.traffic.all_reduce_bytes += tensor.nbytes
        dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Tensor:
        """Overwrite a contiguous `tensor` with that of coordinate `owner`, and return it."""
        dist.broadcast(tensor, src=self.members[owner], group=self.process_group)
        return tensor

    def bring(self, tensor: Tensor, owner: int) -> None:
        """Bring the contiguous `tensor` of coordinate `owner` to coordinate 0, where it overwrites `tensor`.

        Only these two ranks call it. The tensor may be used again when it returns.
        """
        if owner == 0:
            return
        if self.rank == owner:
            dist.send(tensor, self.members[0], group=self.process_group)
        else:
            dist.recv(tensor, self.members[owner], group=self.process_group)
        if tensor.device.type != "cpu":
            # Work that waits in the queue of a device for the other rank would run into the watchdog's time-out.
            torch.accelerator.synchronize(tensor.device)

    def all_gather(self, rows: Tensor, own: Tensor) -> None:
        """Fill row r of the contiguous `rows` with what the contiguous `own` is on coordinate r."""
        # As bytes: no backend sends every dtype.
        sent, received = (tensor.view(-1).view(torch.uint8) for tensor in (own, rows))
        dist.all_gather_single(received, sent, group=self.process_group)

    def from_first(self, tensor: Tensor) -> Tensor:
        """Return coordinate 0's value of a tensor, in new memory on this rank's device."""
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device).copy_(tensor)
        self.broadcast(sent.view(-1).view(torch.uint8))  # as bytes: no backend sends every dtype
        return sent

    def exchange(self, value: Any, patience: timedelta = PATIENCE) -> list[Any]:
        """Return every rank's `value`, in rank order; it must be plain data that JSON can write.

        Raises:
            RankFailure: a rank did not answer within `patience`.
        """
        patience = at_most(patience)
        words = self.words
        turn, deadline = words.next_turn(), time.monotonic() + patience.total_seconds()
        words.store.post(f"{turn}/{self.rank}", [value, self.node[0]])
        values = []
        for rank in range(self.degree):
            left = timedelta(seconds=max(deadline - time.monotonic(), 0))
            try:
                answer = words.store.read(f"{turn}/{rank}", left)
            except TimeoutError as error:
                # A rank that comes later must not go on alone.
                words.store.post(f"{turn}/{self.rank}", [self._named(rank)])
                raise RankFailure(
                    f"{self._named(rank)} did not answer within {patience}: "
                    "has it stopped, or not made the same call?"
                ) from error
            if len(answer) == 1:
                raise RankFailure(f"{self._named(rank)} has given up: it waited in vain for {answer[0]}")
            value, words.hosts[rank] = answer
            values.append(value)
        # All have entered this turn, so all are done with the one before.
        words.store.delete(f"{turn - 1}/{self.rank}")
        return values

    @property
    def words(self) -> Words:
        """What the ranks of this process group exchange words by."""
        if self.process_group not in _words:
            _words[self.process_group] = Words(self.process_group.get_group_store(), self.rank)
        return _words[self.process_group]

    def give_up(self, error: BaseException) -> None:
        """Fail the agreement that comes next, without waiting for the ranks that will enter it: they raise there."""
        report: list[Any] = [[type(error).__name__, str(error)], {}, None]
        self.words.store.post(f"{self.words.next_turn()}/{self.rank}", [report, self.node[0]])

    def unheard(self, patience: timedelta) -> list[str]:
        """Return the names of the ranks that do not come to this call: after a collective has failed, those it was for.

        Raises:
            StoreLost: the store does not answer either.
        """
        store, deadline = self.words.store, time.monotonic() + patience.total_seconds()
        store.post(f"collective failed/{self.rank}", None)
        missing = []
        for rank in range(self.degree):
            try:
                store.read(
                    f"collective failed/{rank}", timedelta(seconds=max(deadline - time.monotonic(), 0))
                )
            except TimeoutError:
                missing.append(self._named(rank))
        return missing

    def _named(self, rank: int) -> str:
        hosts = self.words.hosts
        host = f", host {hosts[rank]}" if rank in hosts and len(set(hosts.values())) > 1 else ""
        return f"rank {rank} of {self.degree} (global rank {self.members[rank]}{host})"

    @contextmanager
    def agreement(self, name: str, patience: timedelta = PATIENCE) -> Iterator[Step]:
        """Take a step on all ranks or on none: if it fails on one, every rank raises.

        The ranks do not wait for one that has failed in the next collective. A `CheckpointError` or an
        `UnsupportedOption` of one rank is raised on all, in the same words. After another error the rank raises its
        own, and the others `RankFailure` with its message. All ranks must enter, in the same order.

        Args:
            name: What is being done, for the message.
            patience: How long to wait for the slowest rank.
        """
        step = Step()
        error: BaseException | None = None
        try:
            yield step
        except BaseException as caught:  # an interrupt, too, is shown to the others before it goes on
            error = caught
        failure = [type(error).__name__, str(error)] if error else None
        claims = {key: str(value) for key, value in step.claims.items()}
        reports = self.exchange([failure, claims, step.said], patience)
        raise_failure(name, [theirs for theirs, _, _ in reports], error)
        compare_claims(name, [theirs for _, theirs, _ in reports])
        step.heard = [theirs for _, _, theirs in reports]

    def meet(self, sharing: str | None = None) -> tuple[int, ...]:
        """Return the coordinates of the ranks on this rank's node, its own among them.

        Args:
            sharing: The axis along which the ranks share something; where it crosses machines, the first rank says so.

        Raises:
            GroupError: two ranks of one host would put their slices on the same accelerator; on every rank.
        """
        places = self.exchange([self.node, identity(self.device), str(self.device)])
        used = [[node, identity] for node, identity, _ in places]
        for rank, place in enumerate(used):
            first = used.index(place)
            if first != rank and self.device.type != "cpu" and not may_share(self.device, self.process_group):
                raise GroupError(
                    f"ranks {first} and {rank} both use {places[rank][2]} of {place[0][0]}: "
                    "call torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK'])) before loading"
                )
        if self.rank == 0 and sharing is not None:
            tell_crossing(sharing, [node for node, _, _ in places])
        return tuple(rank for rank, (node, _, _) in enumerate(places) if node == places[self.rank][0])

    @property
    def node(self) -> list[str]:
        """What tells this rank's machine from others, its name first."""
        return [socket.gethostname(), _boot()]

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelGroup:
        """Return the group itself: a copied module talks to the same ranks."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a reference without a process group, which cannot leave its process."""
        return (DetachedGroup, (self.rank, self.degree))

    def __repr__(self) -> str:
        """Return e.g. `TensorParallelGroup(rank 1 of 4, cuda:1)`."""
        return f"TensorParallelGroup(rank {self.rank} of {self.degree}, {self.device})"


class CountingGroup(TensorParallelGroup):
    """Stands in for a group where there is none: one rank of `degree` that counts what it would send.

    With it a model without weights can be localised and run, for the static check and for forecasts.
    """

    def __init__(self, degree: int, rank: int = 0) -> None:
        self.rank, self.degree, self.members = rank, degree, list(range(degree))
        self.device = torch.device("meta")
        self.traffic = Traffic()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Count the sum, and return the tensor."""
        self.traffic.all_reduces += 1
        self.traffic.all_reduce_bytes += tensor.nbytes
        return tensor

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as itself: it has no process group to leave behind."""
        return (CountingGroup, (self.degree, self.rank))


class DetachedGroup:
    """What an unpickled sharded module holds in place of its group: it knows its slice, but cannot reduce."""

    def __init__(self, rank: int, degree: int) -> None:
        self.rank, self.degree = rank, degree

    def __getattr__(self, name: str) -> Any:
        """Refuse every collective with the reason."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise GroupError(
            f"this module was unpickled as rank {self.rank} of {self.degree} and has no process group: "
            "load the model with from_pretrained(parallel_config=...) on each rank instead of pickling it"
        )


def is_initialized() -> bool:
    """Return whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


_words: WeakKeyDictionary[dist.ProcessGroup, Words] = WeakKeyDictionary()


def _boot() -> str:
    """Return what tells two machines of one name apart, where there is such a thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _mesh_group(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, list[int], str]:
    members = mesh.mesh.tolist()
    if mesh.get_coordinate() is None:
        raise GroupError(
            f"rank {dist.get_rank()} is not in the mesh {members}: "
            "only its ranks may load or shard a model over it"
        )
    return mesh.get_group(), members, mesh.device_type


def default_device_type() -> str:
    """Return the type of the devices that the default process group connects."""
    return _world_group()[2]


def _world_group() -> tuple[dist.ProcessGroup, list[int], str]:
    group = dist.group.WORLD
    assert group is not None  # initialised: the caller checked
    members = list(range(dist.get_world_size()))
    return group, members, device_type_of(group)
