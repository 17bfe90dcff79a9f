"""Models of a few Linears, small enough to see through: one for each way a plan can go wrong."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise import (
    PackedColwiseParallel,
    PackedDepthwiseParallel,
    PackedRowwiseParallel,
    SliceExperts,
    SliceOutput,
    SliceParameter,
    SumOnce,
    TensorParallelMixin,
)
from shardwise.plan.styles import GatherOutput


class Mlp(TensorParallelMixin, ModelMixin, ConfigMixin):
    """LayerNorm, colwise Linear with bias, GELU, rowwise Linear with bias."""

    _tp_plan = {"up": "colwise", "down": "rowwise"}

    @register_to_config
    def __init__(self, width: int = 8, hidden: int = 16, out: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, out or width)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        return (self.down(F.gelu(self.up(self.norm(x)))) * self.scale,)


class Glu(TensorParallelMixin, ModelMixin, ConfigMixin):
    """A fused gate-and-value projection: packed colwise, then rowwise."""

    _tp_plan = {"gate_value": PackedColwiseParallel([1, 1]), "down": "rowwise"}

    @register_to_config
    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.gate_value = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        gate, value = self.gate_value(x).chunk(2, -1)
        return (self.down(F.silu(gate) * value),)


class CountingAttention(nn.Module):
    """An attention that reshapes by its head count: undivided, it makes twice as many heads of half the width."""

    def __init__(self, width: int, heads: int, kv_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        head_dim = width // heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, self.kv_heads * head_dim)
        self.to_v = nn.Linear(width, self.kv_heads * head_dim)
        self.to_out = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (n, -1)).transpose(1, 2)
            for proj, n in ((self.to_q, self.heads), (self.to_k, self.kv_heads), (self.to_v, self.kv_heads))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.kv_heads != self.heads)
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """Queries in groups that read one key head each, repeated for them as transformers' `repeat_kv` does.

    Keys are normalised over all of their heads together.
    """

    def __init__(self, width: int = 24, heads: int = 8, kv_heads: int = 2) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.num_heads, self.num_key_value_heads = heads, kv_heads
        self.num_key_value_groups = heads // kv_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim)
        self.k_norm = nn.RMSNorm(kv_heads * self.head_dim, eps=1e-6)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        k, v = (self._repeated(t) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))

    def _repeated(self, x: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        wide = x[:, :, None].expand(batch, heads, self.num_key_value_groups, length, width)
        return wide.reshape(batch, heads * self.num_key_value_groups, length, width)


class Grouped(TensorParallelMixin, ModelMixin, ConfigMixin):
    """Blocks of grouped-query attention."""

    _tp_plan = {
        "blocks.*.q_proj": "colwise",
        "blocks.*.k_proj": "colwise",
        "blocks.*.v_proj": "colwise",
        "blocks.*.k_norm": "across_head_norm",
        "blocks.*.o_proj": "rowwise",
    }

    @register_to_config
    def __init__(self, kv_heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GroupedAttention(kv_heads=kv_heads) for _ in range(layers))

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return (x,)


class Transformer(TensorParallelMixin, ModelMixin, ConfigMixin):
    """Blocks of attention with residuals; a rotary-like table as a buffer that no checkpoint holds."""

    _tp_plan = {
        "blocks.*.to_q": "colwise",
        "blocks.*.to_k": "colwise",
        "blocks.*.to_v": "colwise",
        "blocks.*.to_out.0": "rowwise",
    }

    @register_to_config
    def __init__(
        self, width: int = 16, num_attention_heads: int = 4, kv_heads: int | None = None, layers: int = 2
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            CountingAttention(width, num_attention_heads, kv_heads) for _ in range(layers)
        )
        self.register_buffer("table", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        for block in self.blocks:
            x = x * self.table + block(x)
        return (x,)


class ParallelBlock(nn.Module):
    """Fused q, k, v, gate and value in; cat(attention, mlp) out. Declares its blocks where the widths are known."""

    def __init__(self, width: int = 16, heads: int = 4, mlp: int = 32) -> None:
        super().__init__()
        self.head_dim = width // heads
        blocks = [width, width, width, mlp, mlp]
        self.proj_in = nn.Linear(width, sum(blocks))
        self.proj_in._tp_packed_col_blocks = blocks
        self.proj_out = nn.Linear(width + mlp, width)
        self.proj_out._tp_packed_row_blocks = [width, mlp]
        self.ratios = (width, mlp)

    def forward(self, x: Tensor) -> Tensor:
        width, mlp = self.ratios
        fused = self.proj_in(x)
        share = fused.shape[-1] / (3 * width + 2 * mlp)
        q, k, v, gate, value = fused.split([int(share * w) for w in (width, width, width, mlp, mlp)], -1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        attention = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.proj_out(torch.cat([attention, F.silu(gate) * value], -1))


class Parallel(TensorParallelMixin, ModelMixin, ConfigMixin):
    """Single-stream blocks as in FLUX.2, with unequal blocks."""

    _tp_plan = {"blocks.*.proj_in": PackedColwiseParallel(), "blocks.*.proj_out": PackedRowwiseParallel()}

    @register_to_config
    def __init__(self, layers: int = 2, width: int = 16, mlp: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ParallelBlock(width=width, mlp=mlp) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        for block in self.blocks:
            x = block(x)
        return (self.norm(x),)


class Modulation(TensorParallelMixin, ModelMixin, ConfigMixin):
    """A lone projection with a whole input; its output is chunked in six and used whole."""

    _tp_plan = {"linear": "rowwise_split_input"}

    @register_to_config
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 48)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor, ...]:
        return self.linear(F.silu(x)).chunk(6, -1)


class Gated(TensorParallelMixin, ModelMixin, ConfigMixin):
    """Heads, each with a gate: a number that the model itself holds."""

    _tp_plan = {"": SliceParameter("gate", 0), "up": "colwise", "down": "rowwise"}

    @register_to_config
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(0.5, 2.0, heads))
        self.up, self.down = nn.Linear(8, heads * 3), nn.Linear(heads * 3, 8)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        heads = self.up(x).unflatten(-1, (-1, 3))
        return (self.down((heads * self.gate.tanh().unsqueeze(-1)).flatten(-2)),)


class Mixer(nn.Module):
    """Gives its output, and beside it what a second branch makes, in room of the output's shape."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.last, self.extra = nn.Dropout(0.0), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = self.last(self.down(F.gelu(self.up(x))))
        beside = torch.zeros_like(output)
        beside += 0.5 * F.silu(self.extra(x))
        return output, beside


class Beside(TensorParallelMixin, ModelMixin, ConfigMixin):
    """A sharded branch that no rowwise layer follows, as the IP adapters of FLUX.1 are."""

    _tp_plan = {
        "mixer.up": "colwise",
        "mixer.down": "rowwise",
        "mixer.extra": "colwise",
        "mixer.last": SliceOutput(-1),
        "mixer": GatherOutput(8),
    }

    @register_to_config
    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.mixer = Mixer(width, hidden)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        output, beside = self.mixer(x)
        return (x + output * output.mean(-1, keepdim=True) + beside,)


class Glued(nn.Module):
    """Two experts side by side in two parameters, of which the first fuses gate and value."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(2, 8, 24)), nn.Parameter(torch.ones(2, 12, 8))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = (x.flatten(0, -2) @ self.up).chunk(2, -1)
        return ((F.silu(gate) * value) @ self.down).unflatten(1, x.shape[:-1])


class Experts(nn.Module):
    """Three experts in a list and two side by side; a router says how much of each every token gets."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.glued = nn.Linear(8, 5), Glued()
        self.listed = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        total, rows = torch.zeros_like(x), torch.arange(len(x))
        for i, part in enumerate([*(expert(x) for expert in self.listed), *self.glued(x).unbind(0)]):
            total = total.index_add(0, rows, part * shares[..., i : i + 1])
        return total


class Mixture(TensorParallelMixin, ModelMixin, ConfigMixin):
    """A mixture of experts between two norms."""

    _tp_plan = {
        "experts": SumOnce(
            {
                "listed.*.0": "colwise",
                "listed.*.2": "rowwise",
                "glued": SliceExperts("up", "down", [1, 1]),
            }
        )
    }

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts, self.out = nn.LayerNorm(8), Experts(), nn.LayerNorm(8)

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        return (self.out(x + self.experts(self.norm(x))),)


class Convolutions(TensorParallelMixin, ModelMixin, ConfigMixin):
    """A gated feed-forward of convolutions, and a lone one of which each place reads its neighbours."""

    _tp_plan = {
        "up": PackedColwiseParallel([1, 1]),
        "depth": PackedDepthwiseParallel([1, 1]),
        "down": "rowwise",
        "along": "rowwise_split_input",
    }

    @register_to_config
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Conv2d(width, 2 * hidden, 1)
        self.depth = nn.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden)
        self.down = nn.Conv2d(hidden, width, 1)
        self.along = nn.Conv2d(width, width, (3, 1), padding=(1, 0), padding_mode="circular")

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        gate, value = self.depth(F.silu(self.up(x))).chunk(2, 1)
        output = self.down(F.silu(gate) * value)
        return (x + output + self.along(output),)


SMALL: dict[type[Any], tuple[int, ...]] = {
    Mlp: (3, 7, 8),
    Glu: (3, 7, 8),
    Transformer: (3, 7, 16),
    Grouped: (3, 7, 24),
    Gated: (3, 7, 8),
    Parallel: (3, 7, 16),
    Modulation: (3, 12),
    Beside: (3, 7, 8),
    Mixture: (3, 7, 8),
    Convolutions: (3, 8, 5, 7),
}
"""Each small model and the shape of its input; batch and sequence are odd."""


def small_input(cls: type[Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the input of a small model."""
    return {"x": torch.randn(SMALL[cls], generator=torch.Generator().manual_seed(seed)).to(dtype)}
