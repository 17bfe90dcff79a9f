"""What the user chose: how models are sharded, over which ranks, and what other ranks there are for.

Holds no live state: process groups, ranks and devices belong to `runtime.group`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
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


PARALLEL_AXES = ("dp", "cfg", "ring", "ulysses", "tp")
"""Axes of the mesh that a `ParallelConfig` means; the ranks of the last are neighbours, who send the most."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks share the work of one pipeline; the product of all degrees is the number of ranks.

    Args:
        tp: Tensor parallelism: ranks that each hold a slice of the weights.
        cfg: Ranks that each compute some of the branches of classifier-free guidance; 2, for two branches.
        dp: Data parallelism: replicas that each draw some of the prompts.
        ulysses: Ranks that each hold a part of the sequence, and some of the heads inside an attention.
        ring: Ranks that each hold a part of the sequence, whose keys and values go round. Not on CPUs.
        tensor: What else is to be known of tensor parallelism; its degree and mesh are left out.

    Raises:
        ConfigError: a degree is not a positive integer, or `tensor` has a degree or mesh of its own.
    """

    tp: int = 1
    cfg: int = 1
    dp: int = 1
    ulysses: int = 1
    ring: int = 1
    tensor: TensorParallelConfig = field(default_factory=TensorParallelConfig)

    def __post_init__(self) -> None:
        """Check each field by itself; whether there are as many ranks is known when there are any."""
        for axis in PARALLEL_AXES:
            degree = getattr(self, axis)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise ConfigError(f"{axis} must be a positive integer, got {degree!r}")
        if not isinstance(self.tensor, TensorParallelConfig):
            raise ConfigError(f"tensor must be a TensorParallelConfig, got {type(self.tensor).__name__}")
        if self.tensor.tp_degree != 1 or self.tensor.mesh is not None:
            raise ConfigError(
                "tensor says how weights are sharded, and tp over how many ranks: leave tp_degree and mesh out of it"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The degrees, in the order of `PARALLEL_AXES`."""
        return tuple(getattr(self, axis) for axis in PARALLEL_AXES)

    @property
    def size(self) -> int:
        """Number of ranks: the product of all degrees."""
        return prod(self.shape)

    def tensor_parallel(self, mesh: DeviceMesh | None = None) -> TensorParallelConfig:
        """Return what models are loaded with: `tensor`, over the axis "tp" of `shardwise.init_mesh(config)`.

        Raises:
            ConfigError: `tp` is above 1 and there is no mesh, or one without that axis.
        """
        if self.tp == 1:
            return self.tensor
        if mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
            raise ConfigError(
                f'tp={self.tp} needs a mesh with an axis "tp", got {mesh}: pass that of shardwise.init_mesh(config)'
            )
        return replace(self.tensor, mesh=mesh["tp"] if mesh.ndim > 1 else mesh)

    def __str__(self) -> str:
        """Return the degrees above 1, e.g. `cfg=2 x tp=2`."""
        degrees = zip(PARALLEL_AXES, self.shape, strict=True)
        return " x ".join(f"{axis}={degree}" for axis, degree in degrees if degree > 1) or "no degree above 1"
