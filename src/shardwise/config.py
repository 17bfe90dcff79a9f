"""What the user chose: the degree of tensor parallelism and, optionally, the ranks that take part.

Holds no live state: process groups, ranks and devices belong to `runtime.group`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class TensorParallelConfig:
    """How many devices a model is sharded over, and which.

    Args:
        tp_degree: Number of ranks that each hold a slice of every planned weight. It must divide the
            model's attention heads. 1 means an ordinary, whole model and needs no process group.
        mesh: A one-dimensional `DeviceMesh`, possibly a slice of a larger one (`mesh["tp"]`). Its size is
            the degree, and a rank's slice follows its coordinate in the mesh, not its global rank. Without
            a mesh, the ranks are all those of the default process group.
        check: Whether the plan is checked statically: before any weight is read where example inputs are
            known for the class, otherwise on the inputs of the first forward.
        plan: Module patterns and styles, in place of the plan that is declared for the model's class.
        shard_modulation: Whether the plan's lone projections with whole inputs, AdaLN modulations above all, are
            sharded. It saves memory (a quarter of FLUX.1, a third of Qwen-Image) and costs a small sum over the
            ranks for each. Of a plan that is passed nothing is left out.
        uneven: Whether attentions whose number of heads the degree does not divide are shared all the same: each rank
            holds whole heads, the first ranks one more than the last (30 heads on 4 ranks: 8, 8, 7 and 7). Ranks with
            fewer heads wait for the others, so a degree that divides is faster for its size.
        debug: Whether every forward compares the model's inputs over the ranks, and raises where they differ. The
            environment variable `SHARDWISE_DEBUG=1` asks for the same. One rank that asks is enough.
        load_timeout: Seconds that a rank waits for the slowest one to download or read its files. The process
            group's own time-out does not count meanwhile.

    Raises:
        ConfigError: `tp_degree` is not a positive integer, or `mesh` is not one-dimensional, or the two
            disagree, or `load_timeout` is no positive number.
    """

    tp_degree: int = 1
    mesh: DeviceMesh | None = None
    check: bool = True
    plan: Mapping[str, object] | None = field(default=None, hash=False)
    shard_modulation: bool = True
    uneven: bool = False
    debug: bool = False
    load_timeout: float = 7200.0

    def __post_init__(self) -> None:
        """Check the fields against each other; a mesh alone decides the degree."""
        if isinstance(self.tp_degree, bool) or not isinstance(self.tp_degree, int) or self.tp_degree < 1:
            raise ConfigError(f"tp_degree must be a positive integer, got {self.tp_degree!r}")
        if isinstance(self.load_timeout, bool) or not 0 < self.load_timeout < float("inf"):
            raise ConfigError(f"load_timeout must be a positive number of seconds, got {self.load_timeout!r}")
        if self.mesh is None:
            return
        if not isinstance(self.mesh, DeviceMesh):
            raise ConfigError(f"mesh must be a torch.distributed DeviceMesh, got {self.mesh!r}")
        if self.mesh.ndim != 1:
            names = self.mesh.mesh_dim_names or ()
            example = f'mesh["{names[-1]}"]' if names else "a one-dimensional slice of it"
            raise ConfigError(f"mesh has {self.mesh.ndim} axes, tensor parallelism takes one: pass {example}")
        if self.tp_degree not in (1, self.mesh.size()):
            raise ConfigError(
                f"tp_degree is {self.tp_degree} but the mesh has {self.mesh.size()} ranks: "
                "leave tp_degree out, or pass a mesh of that size"
            )
        object.__setattr__(self, "tp_degree", self.mesh.size())

    @property
    def tensor_parallel_config(self) -> NoReturn:
        """Diffusers' own classes ask for this when they are given a config they do not know.

        Raises:
            ConfigError: always; the class to use is that of `shardwise.models`.
        """
        raise ConfigError(
            "this is shardwise's TensorParallelConfig, and the model's class is diffusers' own: import the class "
            "from shardwise.models, or call shardwise.enable_parallelism(model, config=...)"
        )
