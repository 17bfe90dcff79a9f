"""Inference of a plan by dataflow: each repair alone, the declared plans found again, and what stays whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise import DivideAttributes, PackedColwiseParallel, PackedRowwiseParallel, SliceOutput, infer
from shardwise.cli import main
from shardwise.errors import ConfigError, PlanError
from shardwise.plan import mend
from shardwise.plan.infer import Inferred
from shardwise.plan.repair import (
    Align,
    EqualBlocks,
    KeepWhole,
    PlanRowwise,
    RefineBlocks,
    ShardToo,
    SplitView,
)
from shardwise.plan.resolve import resolve
from shardwise.plan.rules import RULES
from tests.found_plans import THIRTEEN, VARIANTS, Difference, difference, inferred_for
from tests.helpers import FAMILIES, tiny_model
from tests.small_models import Mlp, small_input

WIDTH = 16


class Blocks(nn.Module):
    """Residual blocks in a list, as inference looks for them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def inferred(block: type[nn.Module], degree: int = 2, count: int = 2) -> Inferred:
    model = Blocks(*(block() for _ in range(count)))
    return infer(model, degree, {"x": torch.ones(3, 7, WIDTH)})


def plan_of(block: type[nn.Module], degree: int = 2) -> dict[str, Any]:
    """Return the inferred plan of a block, its keys relative to the block."""
    return {key.removeprefix("blocks.*."): style for key, style in inferred(block, degree).plan.items()}


# --- each repair alone -------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(self.norm(x))))


class Halves(Plain):
    """A fused gate and value."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 48)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.first(self.norm(x)).chunk(2, -1)
        return self.second(F.silu(gate) * value)


class Gated(Plain):
    """Gate and value in two Linears: the second follows the first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.gate(x)) * self.first(x))


class Fused(nn.Module):
    """Fused q, k and v that are viewed as [3, heads, width of a head], under names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta, self.size = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), 4

    def forward(self, x: Tensor) -> Tensor:
        fused = self.alpha(x).view(*x.shape[:2], 3, -1, WIDTH // 4)
        q, k, v = (part.transpose(1, 2) for part in fused.unbind(2))
        return self.beta(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Attention(nn.Module):
    """Reshapes by a count that is kept under an unknown name; queries and keys may be normed over all heads."""

    def __init__(self, kv: int = 4, norm: bool = False) -> None:
        super().__init__()
        self.one, self.four = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two, self.three = (nn.Linear(WIDTH, kv * 4) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH) if norm else nn.Identity()
        self.apples, self.pears, self.seven = 4, kv, 14

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.norm(self.one(x)), self.two(x), self.three(x)
        q = q.unflatten(-1, (self.apples, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.pears, -1)).transpose(1, 2) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.pears != self.apples)
        return self.four(mixed.transpose(1, 2).flatten(2))


class Grouped(Attention):
    def __init__(self) -> None:
        super().__init__(kv=2)


class Normed(Attention):
    def __init__(self) -> None:
        super().__init__(norm=True)


class Joined(Attention):
    """cat(attention, mlp) in one projection, of which the MLP is the wider part."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.four = nn.Linear(WIDTH, 40), nn.Identity()
        self.out = nn.Linear(WIDTH + 40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([super().forward(x), F.gelu(self.mlp(x))], -1))


class Pieces(nn.Module):
    """One projection that is split, and a half of it again: blocks are found inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, rest = self.wide(x).chunk(2, -1)
        (a, b), (c, d) = first.chunk(2, -1), rest.chunk(2, -1)
        return self.narrow(a * b + c * d)


class Product(Plain):
    """The product of two projections is split: both have the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.second = (nn.Linear(*size) for size in ((16, 48), (16, 48), (24, 16)))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = (self.first(x) * self.other(x)).chunk(2, -1)
        return self.second(F.silu(gate) * value)


class Swapped(Gated):
    """The halves of one projection change places and meet another projection, which is not split."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.cat(self.first(x).chunk(2, -1)[::-1], -1) * self.gate(x))


class Unbound(Halves):
    """Two fused parts in a dim of their own, which two ranks divide."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.first(x).view(*x.shape[:2], 2, -1).unbind(2)
        return self.second(F.silu(gate) * value)


QKV = dict.fromkeys(("one", "two", "three"), "colwise") | {"four": "rowwise"}
COUNTS = DivideAttributes("apples", "pears")

EXPECTED: dict[type[nn.Module], dict[str, Any]] = {
    Plain: {"first": "colwise", "second": "rowwise"},
    Halves: {"first": PackedColwiseParallel([1, 1]), "second": "rowwise"},
    Gated: {"first": "colwise", "gate": "colwise", "second": "rowwise"},
    Fused: {"alpha": PackedColwiseParallel([1, 1, 1]), "beta": "rowwise"},
    Attention: {**QKV, "blocks.*": COUNTS},
    Grouped: {**QKV, "blocks.*": COUNTS},
    Normed: {**QKV, "norm": "across_head_norm", "blocks.*": COUNTS},
    Joined: {
        **dict.fromkeys(("one", "two", "three", "mlp"), "colwise"),
        "out": PackedRowwiseParallel([2, 5]),
        "blocks.*": COUNTS,
    },
    Product: {
        "first": PackedColwiseParallel([1, 1]),
        "other": PackedColwiseParallel([1, 1]),
        "second": "rowwise",
    },
    Swapped: {
        "first": PackedColwiseParallel([1, 1]),
        "gate": PackedColwiseParallel([1, 1]),
        "second": PackedRowwiseParallel([1, 1]),
    },
    Unbound: {"first": PackedColwiseParallel([1, 1]), "second": "rowwise"},
    Pieces: {"wide": PackedColwiseParallel([1, 1, 1, 1]), "narrow": "rowwise"},
}


@pytest.mark.parametrize("block", EXPECTED, ids=lambda block: block.__name__)
def test_plan_of_a_block_is_found(block: type[nn.Module]) -> None:
    assert plan_of(block) == EXPECTED[block]


class Rotated(nn.Module):
    """Queries and keys are turned by a table that a module of the model lays over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = Table(), nn.ModuleList(Turned() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        table = self.table(x)
        for block in self.blocks:
            x = x + block(x, table)
        return x


class Table(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1] * WIDTH, dtype=x.dtype).view(1, x.shape[1], WIDTH).cos()


class Turned(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.second(self.first(x) * table)


def test_table_of_a_module_without_linears_is_sliced() -> None:
    plan = infer(Rotated(), 2, {"x": torch.ones(3, 7, WIDTH)}).plan
    assert plan == {"table": SliceOutput(-1), "blocks.*.first": "colwise", "blocks.*.second": "rowwise"}


NEEDS: dict[type, type[nn.Module]] = {
    ShardToo: Gated,
    PlanRowwise: Plain,
    RefineBlocks: Halves,
    KeepWhole: Normed,
    SplitView: Fused,
    Align: Swapped,
    EqualBlocks: Unbound,
}


@pytest.mark.parametrize("repair", NEEDS, ids=lambda repair: repair.__name__)
def test_without_a_repair_the_block_that_needs_it_is_not_found(
    repair: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(mend._REPAIRS, repair)
    found = _or_none(NEEDS[repair])
    assert found != EXPECTED[NEEDS[repair]]
    if repair is PlanRowwise:
        assert found == dict.fromkeys(("first", "second"), "rowwise_split_input")


def test_every_repair_is_known_to_inference() -> None:
    assert set(mend._REPAIRS) == set(NEEDS)


def test_rule_that_is_wrong_gives_a_wrong_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "chunk", lambda call: [call.layout(call.args[0])] * len(call.output))
    assert _or_none(Halves) != EXPECTED[Halves]


def _or_none(block: type[nn.Module]) -> dict[str, Any] | None:
    try:
        return plan_of(block)
    except PlanError:
        return None


@pytest.mark.parametrize(
    ("old", "piece", "sizes", "new"),
    [
        ((64,), (64,), (16, 48), (16, 48)),
        ((64, 32), (32,), (16, 16), (64, 16, 16)),
        ((24, 24), (2, 2), (1, 1, 2), (12, 12, 24)),
        ((64, 32), (16,), (8, 8), None),
    ],
)
def test_piece_is_placed_among_the_blocks_of_its_producer(old: Any, piece: Any, sizes: Any, new: Any) -> None:
    assert mend._placed(old, piece, sizes) == new


def test_shards_that_meet_get_the_borders_of_both() -> None:
    assert mend._merged((8, 8), (4, 12)) == (4, 4, 8)


# --- the search --------------------------------------------------------------------------------------------------


class Greedy(Attention):
    """An embedder whose output goes straight into the values: as a pair they would keep the attention whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values = self.embed(x)
        q, k, v = self.one(x), self.two(x), self.three(values)
        q, k, v = (t.unflatten(-1, (self.apples, -1)).transpose(1, 2) for t in (q, k, v))
        return self.four(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_small_pair_does_not_take_a_linear_from_a_better_group() -> None:
    plan = plan_of(Greedy)
    assert plan == {
        **QKV,
        "embed": "rowwise_split_input",
        "blocks.*": DivideAttributes("apples"),
    }


class Modulated(Plain):
    """A lone projection, and one of whose input the degree divides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.odd, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(7, WIDTH), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift(F.silu(x)) + self.odd(x[..., :7])


def test_large_linear_left_whole_splits_its_input_and_the_rest_stays_with_a_reason() -> None:
    found = inferred(Modulated)
    assert found.plan["blocks.*.shift"] == "rowwise_split_input"
    assert set(found.whole) == {"blocks.*.odd", "blocks.*.never"}
    assert "example inputs" in found.whole["blocks.*.never"]
    assert "whole" in found.whole["blocks.*.odd"]


def test_linear_that_is_not_large_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.plan.infer.LARGE", 0.9)
    found = inferred(Modulated)
    assert "blocks.*.shift" in found.whole
    assert set(found.plan) == {"blocks.*.first", "blocks.*.second"}


class Different(Blocks):
    """Blocks of one class and two kinds; the forward counts them."""

    def __init__(self) -> None:
        super().__init__(Plain(), Plain(), Plain())
        self.blocks[2].extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = x + self.blocks[i](x)
        return x


def test_forward_that_counts_its_blocks_is_searched_whole() -> None:
    found = infer(Different(), 2, {"x": torch.ones(3, 7, WIDTH)})
    assert {key: found.plan[key] for key in found.plan} == {
        "blocks.*.first": "colwise",
        "blocks.*.second": "rowwise",
    }
    assert set(found.whole) == {"blocks.*.extra"}
    assert found.report.all_reduces == 3


def test_bytes_and_all_reduces_are_those_of_the_whole_model() -> None:
    found = inferred(Plain, degree=4)
    (group,) = found.groups
    cut = 2 * 4 * (24 * WIDTH * 2 + 24)  # blocks, bytes, two weights and a bias
    assert group.bytes_saved == cut - cut // 4
    assert group.all_reduces == found.report.all_reduces == 2


def test_model_that_was_given_stays_as_it_was() -> None:
    model = Blocks(Halves())
    model.blocks[0].first._tp_packed_col_blocks = [24, 24]
    infer(model, 2, {"x": torch.ones(3, 7, WIDTH)})
    assert model.blocks[0].first._tp_packed_col_blocks == [24, 24]
    assert not any(p.is_meta for p in model.parameters())
    assert model.training


def test_nothing_to_shard_is_an_error() -> None:
    with pytest.raises(PlanError, match="shards no weight"):
        infer(nn.Linear(4, 4), 2, {"input": torch.ones(3, 4)})


# --- the declared plans ------------------------------------------------------------------------------------------


NOT_FOUND: dict[str, Difference] = {
    # Each head meets a number of its own, a parameter of the block, which inference does not slice: the attentions only
    # split their inputs.
    "LuminaNextDiT2DModel": Difference(
        groups=True,
        more=tuple(
            f"layers.*.{name}"
            for name in (
                *("attn1.to_k", "attn1.to_q", "attn1.to_v"),
                *("attn2.to_k", "attn2.to_out.0", "attn2.to_q", "attn2.to_v"),
            )
        ),
    ),
    # A modulation of two refiner blocks, below a thousandth of the weights of the default configuration.
    "BriaFibo2Transformer2DModel": Difference(more=("noise_refiner.*.adaLN_modulation.0",)),
    # A modulation of configurations that the tiny one is not: its entry is optional.
    "LongCatAudioDiTTransformer": Difference(less=("blocks.*.adaln_mlp.mlp.1",)),
    # The declared plan cuts the frequencies, inference the table that is made of them; and a small modulation.
    "MochiTransformer3DModel": Difference(groups=True, more=("transformer_blocks.*.norm1_context.linear_1",)),
    # Inference starts from Linears, and the feed-forwards are convolutions.
    "SanaTransformer2DModel": Difference(groups=True),
    "SanaVideoTransformer3DModel": Difference(groups=True, less=("transformer_blocks.*.ff.conv_temp",)),
    # Its gates are below a thousandth of the weights of the default configuration.
    "SanaWMTransformer3DModel": Difference(
        groups=True,
        more=("blocks.*.attn.beta_proj", "blocks.*.attn.gate_proj"),
        less=("blocks.*.mlp.t_conv",),
    ),
    # The rotary table is an input, and inference slices what modules return.
    "SanaWMLTX2RefinerTransformer3DModel": Difference(
        groups=True,
        more=tuple(f"transformer_blocks.*.attn1.{name}" for name in ("to_k", "to_out.0", "to_q", "to_v")),
    ),
    # The declared plan also shares an embedder, which is in no list of blocks.
    "T5FilmDecoder": Difference(groups=True),
    # Experts that are no Linears, and a router below a thousandth of the weights of the default configuration.
    "NucleusMoEImageTransformer2DModel": Difference(groups=True, more=("transformer_blocks.*.img_mlp.gate",)),
    # The declared plan also shares embedders and updates of the pairs, which are in no list of blocks.
    "RFD4ProteinaTransformer": Difference(groups=True),
}
"""Where inference finds another plan than the declared one, and why."""

LEFT_WHOLE = {
    # It makes one number for each head, and the heads are not shared.
    "RFD4ProteinaTransformer": "mhba.mha.to_bias",
    # It has weights that no forward uses.
    "SanaWMLTX2RefinerTransformer3DModel": "audio",
}
"""What is in the names of Linears that inference leaves whole in a list of blocks."""


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_declared_plan_is_found_by_dataflow(name: str) -> None:
    found = inferred_for(name)
    assert difference(name, found.plan) == NOT_FOUND.get(name, Difference())
    assert found.report.ok
    assert found.proved
    assert all(LEFT_WHOLE.get(name, "nothing") in key for key in found.whole)


@pytest.mark.parametrize("name", THIRTEEN)
def test_groups_add_up_to_the_plan(name: str) -> None:
    found = inferred_for(name)
    entries = {key: style for group in found.groups for key, style in group.entries.items()}
    counted = {key for key, style in entries.items() if isinstance(style, DivideAttributes)}
    assert {key: entries[key] for key in entries if key not in counted - set(found.plan)} == found.plan
    assert sum(group.all_reduces for group in found.groups) == found.report.all_reduces
    assert all(group.bytes_saved > 0 and group.steps for group in found.groups)


def test_python_that_is_printed_is_the_plan() -> None:
    found = inferred_for("LTXVideoTransformer3DModel")
    for result in (found, inferred_for("Flux2Transformer2DModel"), inferred(Grouped)):
        names: dict[str, Any] = {name: getattr(shardwise, name) for name in shardwise.__all__}
        exec(result.as_python(), names)
        assert names["_tp_plan"] == result.plan


def test_report_gives_each_group_its_reason() -> None:
    text = str(inferred_for("LTXVideoTransformer3DModel"))
    assert "transformer_blocks.*.attn1.to_q: saves" in text
    assert 'transformer_blocks.*.attn1.norm_q "across_head_norm": rms_norm normalises' in text
    assert "the plan is right at tp_degree 2" in text


# --- the call and the command ------------------------------------------------------------------------------------


def test_linears_in_no_list_of_blocks_are_not_planned() -> None:
    with pytest.raises(PlanError, match="shards no weight"):
        infer(Mlp(), 2, small_input(Mlp))


class Sized(nn.Module):
    """Its default configuration is none: a size that has to be given."""

    def __init__(self, size: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * size, 4)


def test_class_without_a_default_configuration_asks_for_one() -> None:
    with pytest.raises(ConfigError, match=r"Sized has no default configuration that works .*config\.json"):
        infer(Sized)


def test_class_by_name_is_its_tiny_configuration() -> None:
    found = infer("MiniMaxH3Transformer3DModel")
    assert found.plan == inferred_for("MiniMaxH3Transformer3DModel").plan


def test_command_prints_an_inferred_plan_as_python_and_as_json() -> None:
    command = ["plan", "WanTransformer3DModel", "--infer"]
    python = CliRunner().invoke(main, [*command, "--python"])
    assert python.exit_code == 0, python.output
    assert python.output == inferred_for("WanTransformer3DModel").as_python() + "\n"
    report = json.loads(CliRunner().invoke(main, [*command, "--json"]).output)
    assert report["plan"]["blocks.*.attn1.norm_q"] == "across_head_norm"
    assert report["check"]["ok"] is True
    assert report["proved"] is True


def test_command_of_an_unknown_model_exits_with_two() -> None:
    assert CliRunner().invoke(main, ["plan", "NoSuchTransformer", "--infer"]).exit_code == 2


def test_plan_without_guards_means_what_is_written_in_it() -> None:
    model, half = tiny_model("WanTransformer3DModel"), {"blocks.*.attn1.to_q": "colwise"}
    with pytest.raises(PlanError, match="HalfPlanned"):
        resolve(model, half, 2)
    planned = resolve(model, half, 2, guards=False).modules
    assert {m.plan_key for m in planned} == set(half)
    assert not any(isinstance(m.style, DivideAttributes) for m in planned)
