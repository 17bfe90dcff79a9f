"""Sharding styles: how each cuts a Linear, what it divides, and what it refuses."""

from types import SimpleNamespace

import pytest
from torch import nn

from shardwise.errors import ConfigError
from shardwise.plan.layout import Replicated, Shard
from shardwise.plan.styles import (
    STYLES,
    ColwiseGatherOutputParallel,
    ColwiseParallel,
    DivideAttributes,
    EmbeddingRowwiseParallel,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    PerHead,
    RowwiseParallel,
    RowwiseSplitInputParallel,
    Style,
    StyleFault,
    as_style,
    is_count,
)
from shardwise.runtime.modules import LOCAL_CLASSES, LocalLayer

ROWWISE = [RowwiseParallel(), RowwiseSplitInputParallel(), PackedRowwiseParallel([1, 3])]
COLWISE = [ColwiseParallel(), PackedColwiseParallel([1, 3])]
LINEAR_STYLES = [*COLWISE, *ROWWISE]


def label(value: object) -> str | None:
    """Name a test's parameter, where it is a style."""
    return value.label if isinstance(value, Style) else None


def local(style: Style, module: nn.Module, degree: int) -> dict[str, int]:
    """The attributes that a style divides, on the first rank."""
    return {name: cut.local_size(0, degree) for name, cut in style.attributes(module, degree).items()}


def linear(in_features: int = 8, out_features: int = 12, bias: bool = True, **declared: object) -> nn.Linear:
    """Return a Linear, with what a model's `__init__` may declare on it."""
    module = nn.Linear(in_features, out_features, bias=bias)
    vars(module).update(declared)
    return module


def fault_of(style: Style, module: nn.Module) -> StyleFault:
    with pytest.raises(StyleFault) as caught:
        style.layouts(module)
    return caught.value


# ---------------------------------------------------------------- how a Linear is cut


def test_P3_colwise_cuts_output_rows_and_their_bias() -> None:
    assert ColwiseParallel().layouts(linear()) == {"weight": Shard(0, (12,)), "bias": Shard(0, (12,))}


@pytest.mark.parametrize("style", [RowwiseParallel(), RowwiseSplitInputParallel()], ids=label)
def test_P4_P5_rowwise_cuts_input_columns_and_keeps_the_bias_whole(style: Style) -> None:
    assert style.layouts(linear()) == {"weight": Shard(1, (8,)), "bias": Replicated()}


@pytest.mark.parametrize("style", LINEAR_STYLES, ids=label)
def test_linear_style_without_bias_lays_out_the_weight_alone(style: Style) -> None:
    assert list(style.layouts(linear(bias=False))) == ["weight"]


@pytest.mark.parametrize(
    ("style", "attribute"),
    [(s, "out_features") for s in COLWISE] + [(s, "in_features") for s in ROWWISE],
)
def test_linear_style_divides_the_size_it_cuts(style: Style, attribute: str) -> None:
    assert local(style, linear(), 4) == {attribute: getattr(linear(), attribute) // 4}


@pytest.mark.parametrize("style", LINEAR_STYLES, ids=label)
def test_P6_only_colwise_leaves_its_output_sharded(style: Style) -> None:
    assert style.leaves_shard == (style in COLWISE)


@pytest.mark.parametrize("style", LINEAR_STYLES, ids=label)
def test_linear_style_has_a_runtime_class(style: Style) -> None:
    local = LOCAL_CLASSES[type(style)]
    assert issubclass(local, LocalLayer)
    assert issubclass(local.of(linear()), nn.Linear)


def test_P3_P4_P5_styles_that_compute_differently_run_in_different_classes() -> None:
    classes = {LOCAL_CLASSES[type(style)] for style in STYLES.values()}
    assert len(classes) == len(STYLES)
    assert LOCAL_CLASSES[PackedColwiseParallel] is LOCAL_CLASSES[ColwiseParallel]
    assert LOCAL_CLASSES[PackedRowwiseParallel] is LOCAL_CLASSES[RowwiseParallel]


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Renamed(nn.Linear):
    pass


@pytest.mark.parametrize("style", LINEAR_STYLES, ids=label)
@pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.ConvTranspose1d(8, 12, 1), OwnForward(8, 12)])
def test_linear_style_refuses_what_does_not_compute_as_a_linear(style: Style, module: nn.Module) -> None:
    fault = fault_of(style, module)
    assert fault.kind == "NotALinear"
    assert type(module).__name__ in str(fault)
    assert style.label in str(fault)


def test_linear_style_takes_a_subclass_that_computes_as_a_linear() -> None:
    assert ColwiseParallel().layouts(Renamed(8, 12))["weight"] == Shard(0, (12,))


@pytest.mark.parametrize("style", LINEAR_STYLES, ids=label)
@pytest.mark.parametrize("dim", [0, 1])
def test_linear_style_refuses_a_weight_that_is_computed_from_others(style: Style, dim: int) -> None:
    module = linear(24, 24)
    nn.utils.parametrizations.weight_norm(module, dim=dim)
    assert fault_of(style, module).kind == "NotPlainWeight"


# ---------------------------------------------------------------- packed blocks


@pytest.mark.parametrize(
    ("blocks", "sizes"), [([1, 1], (6, 6)), ([1, 3], (3, 9)), ([3, 3, 3, 3], (3,) * 4), ([6, 6], (6, 6))]
)
def test_P8_blocks_are_proportions_of_the_packed_dim(blocks: list[int], sizes: tuple[int, ...]) -> None:
    assert PackedColwiseParallel(blocks).layouts(linear(8, 12)) == {
        "weight": Shard(0, sizes),
        "bias": Shard(0, sizes),
    }
    assert PackedRowwiseParallel(blocks).layouts(linear(12, 8)) == {
        "weight": Shard(1, sizes),
        "bias": Replicated(),
    }


@pytest.mark.parametrize("style", [PackedColwiseParallel([1, 4]), PackedRowwiseParallel([2, 1])], ids=label)
def test_P8_blocks_whose_sum_does_not_divide_are_refused(style: Style) -> None:
    fault = fault_of(style, linear(8, 12))
    assert fault.kind == "BadBlocks"
    assert str(list(style.blocks)) in str(fault)


@pytest.mark.parametrize(
    ("style", "declared", "dim"),
    [
        (PackedColwiseParallel(), "_tp_packed_col_blocks", 0),
        (PackedRowwiseParallel(), "_tp_packed_row_blocks", 1),
    ],
)
def test_P9_blocks_left_out_are_read_from_the_linear(style: Style, declared: str, dim: int) -> None:
    module = linear(12, 12, **{declared: [4, 2, 6]})
    assert style.layouts(module)["weight"] == Shard(dim, (4, 2, 6))


@pytest.mark.parametrize(
    ("style", "declared", "other"),
    [
        (PackedColwiseParallel(), "_tp_packed_col_blocks", "_tp_packed_row_blocks"),
        (PackedRowwiseParallel(), "_tp_packed_row_blocks", "_tp_packed_col_blocks"),
    ],
)
def test_P9_no_blocks_anywhere_is_refused(style: Style, declared: str, other: str) -> None:
    fault = fault_of(style, linear(12, 12, **{other: [6, 6]}))
    assert fault.kind == "NoBlocks"
    assert declared in fault.fix


@pytest.mark.parametrize("style", [PackedColwiseParallel(), PackedColwiseParallel([1, 1]), ColwiseParallel()])
@pytest.mark.parametrize("declared", [[8, -2, 6], [6, 0, 6], [6.0, 6.0], [6, "6"], 12])
def test_P9_declared_blocks_that_are_not_positive_integers_are_refused(
    style: Style, declared: object
) -> None:
    fault = fault_of(style, linear(_tp_packed_col_blocks=declared))
    assert fault.kind == "BadBlocks"
    assert "_tp_packed_col_blocks" in str(fault)


@pytest.mark.parametrize(
    ("style", "declared"),
    [
        (ColwiseParallel(), "_tp_packed_col_blocks"),
        (PackedColwiseParallel([1, 1]), "_tp_packed_col_blocks"),
        (RowwiseParallel(), "_tp_packed_row_blocks"),
        (RowwiseSplitInputParallel(), "_tp_packed_row_blocks"),
    ],
)
def test_P8_cutting_through_a_declared_block_is_refused(style: Style, declared: str) -> None:
    fault = fault_of(style, linear(12, 12, **{declared: [4, 8]}))
    assert fault.kind == "PackedWeight"
    assert "[4, 8]" in str(fault)


def test_P8_blocks_that_keep_every_declared_border_are_taken() -> None:
    module = linear(8, 12, _tp_packed_col_blocks=[4, 8])
    assert PackedColwiseParallel([1, 1, 1]).layouts(module)["weight"] == Shard(0, (4, 4, 4))


def test_declared_blocks_of_the_other_dim_do_not_concern_a_style() -> None:
    module = linear(12, 12, _tp_packed_row_blocks=[4, 8])
    assert ColwiseParallel().layouts(module)["weight"] == Shard(0, (12,))


@pytest.mark.parametrize("blocks", [[], [1, 0], [1, -1], [1.0, 1.0], [True, True], "11", 2])
@pytest.mark.parametrize("cls", [PackedColwiseParallel, PackedRowwiseParallel])
def test_P8_blocks_must_be_positive_integers(cls: type[Style], blocks: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{cls.__name__}: blocks must be positive integers"):
        cls(blocks)


# ---------------------------------------------------------------- what a degree must divide


@pytest.mark.parametrize(
    ("style", "words"),
    [
        (PackedColwiseParallel([2, 5]), ["block 2 of 2 has 10 rows", "tp_degree 4"]),
        (PackedRowwiseParallel([2, 5]), ["block 2 of 2 has 10 columns", "tp_degree 4"]),
    ],
    ids=label,
)
def test_E5_fault_names_the_block_its_size_and_the_degrees_that_divide(
    style: Style, words: list[str]
) -> None:
    (fault,) = style.faults(linear(14, 14), 4)
    assert fault.kind == "IndivisibleBlock"
    assert all(word in str(fault) for word in words)
    assert fault.fix.endswith(": 1, 2")


@pytest.mark.parametrize("style", LINEAR_STYLES, ids=label)
def test_E5_a_degree_that_divides_every_block_has_no_fault(style: Style) -> None:
    assert not list(style.faults(linear(24, 24), 2))
    assert list(style.faults(linear(24, 24), 5))


def test_E5_each_indivisible_block_is_a_fault_of_its_own() -> None:
    assert len(list(PackedColwiseParallel([1, 2, 3]).faults(linear(8, 18), 4))) == 3
    assert len(list(PackedColwiseParallel([1, 2, 3]).faults(linear(8, 24), 4))) == 0


# ---------------------------------------------------------------- attributes


def attention(**attributes: object) -> nn.Module:
    module = nn.Module()
    vars(module).update(attributes)
    return module


def test_divide_attributes_cuts_no_parameter_and_divides_what_it_names() -> None:
    style, module = DivideAttributes("heads", "inner_dim"), attention(heads=8, inner_dim=64, other=3)
    assert style.layouts(module) == {}
    assert local(style, module, 4) == {"heads": 2, "inner_dim": 16}
    assert not style.leaves_shard
    assert type(style) not in LOCAL_CLASSES


def test_divide_attributes_leaves_alone_what_is_none_in_some_blocks() -> None:
    module = attention(heads=8, kv_heads=None)
    assert DivideAttributes("heads", "kv_heads").layouts(module) == {}
    assert local(DivideAttributes("heads", "kv_heads"), module, 2) == {"heads": 4}


@pytest.mark.parametrize("value", [0, -2, True, 8.0, "8", ...])
def test_divide_attributes_refuses_what_is_not_a_count(value: object) -> None:
    fault = fault_of(DivideAttributes("heads"), attention(heads=value, groups=3))
    assert fault.kind == "NoSuchAttribute"
    assert "groups" in fault.fix


def test_divide_attributes_refuses_a_name_that_only_the_class_has() -> None:
    class Attention(nn.Module):
        heads = 8

    assert fault_of(DivideAttributes("heads"), Attention()).kind == "NoSuchAttribute"


def test_E4_heads_that_the_degree_does_not_divide_are_a_fault() -> None:
    (fault,) = DivideAttributes("heads", "groups").faults(attention(heads=6, groups=4), 4)
    assert fault.kind == "IndivisibleHeads"
    assert str(fault) == "heads is 6; 6 is not divisible by tp_degree 4"
    assert fault.fix.endswith(": 1, 2, 3, 6, or TensorParallelConfig(uneven=True)")


def test_per_head_module_stays_whole_and_sums_its_gradients() -> None:
    assert PerHead().layouts(nn.LayerNorm(4)) == {"weight": Replicated(), "bias": Replicated()}
    assert PerHead().sums_gradients
    assert not any(style.sums_gradients for style in LINEAR_STYLES)


@pytest.mark.parametrize(
    ("value", "answer"), [(1, True), (8, True), (0, False), (-1, False), (True, False), (1.0, False)]
)
def test_is_count_takes_positive_integers_only(value: object, answer: bool) -> None:
    assert is_count(value) is answer


# ---------------------------------------------------------------- vocabularies


def test_vocabulary_is_cut_by_rows_and_summed() -> None:
    style, module = EmbeddingRowwiseParallel(), nn.Embedding(12, 5)
    assert style.layouts(module) == {"weight": Shard(0, (12,))}
    assert (local(style, module, 4), style.sums(module)) == ({"num_embeddings": 3}, 1)
    assert (style.needs(module, 2), style.leaves(module, (2, 3, 5))) == (Replicated(), Replicated())


@pytest.mark.parametrize("module", [nn.Linear(5, 12), nn.Embedding(12, 5, max_norm=1.0), nn.LayerNorm(12)])
def test_vocabulary_is_a_plain_table(module: nn.Module) -> None:
    with pytest.raises(StyleFault, match="shards an nn"):
        EmbeddingRowwiseParallel().layouts(module)


def test_scores_of_all_tokens_are_cut_like_the_vocabulary_and_left_whole() -> None:
    style, module = ColwiseGatherOutputParallel(), linear(5, 12, bias=False)
    assert style.layouts(module) == EmbeddingRowwiseParallel().layouts(nn.Embedding(12, 5))
    assert (style.leaves(module, (2, 12)), style.leaves_shard, style.sums(module)) == (Replicated(), False, 1)


@pytest.mark.parametrize(
    ("style", "module"),
    [(EmbeddingRowwiseParallel(), nn.Embedding(13, 5)), (ColwiseGatherOutputParallel(), nn.Linear(5, 13))],
    ids=label,
)
def test_vocabulary_that_the_degree_does_not_divide_may_stay_whole(style: Style, module: nn.Module) -> None:
    assert style.may_stay_whole
    assert [fault.kind.removeprefix("Indivisible") for fault in style.faults(module, 2)] != []
    assert list(style.faults(module, 13)) == []


# ---------------------------------------------------------------- what a plan may write


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("colwise", ColwiseParallel),
        ("rowwise", RowwiseParallel),
        ("rowwise_split_input", RowwiseSplitInputParallel),
        ("embedding_rowwise", EmbeddingRowwiseParallel),
        ("colwise_gather_output", ColwiseGatherOutputParallel),
    ],
)
def test_P3_P4_P5_style_is_known_by_its_name(name: str, cls: type[Style]) -> None:
    assert type(as_style(name)) is cls
    assert as_style(name).label == f'"{name}"'
    assert len(STYLES) == 7


@pytest.mark.parametrize("cls", [PackedColwiseParallel, PackedRowwiseParallel])
@pytest.mark.parametrize("blocks", [None, [1, 3]])
def test_as_style_takes_the_marker_of_the_same_name(cls: type[Style], blocks: list[int] | None) -> None:
    marker = type(cls.__name__, (SimpleNamespace,), {})(blocks=blocks)
    assert as_style(marker) == cls(blocks)


@pytest.mark.parametrize("style", [*LINEAR_STYLES, DivideAttributes("heads")], ids=label)
def test_as_style_returns_a_style_as_it_is(style: Style) -> None:
    assert as_style(style) is style


@pytest.mark.parametrize("value", ["columnwise", "", None, 3, ["colwise"], PackedColwiseParallel])
def test_as_style_refuses_what_is_no_style_and_lists_those_there_are(value: object) -> None:
    with pytest.raises(StyleFault) as caught:
        as_style(value)
    assert caught.value.kind == "UnknownStyle"
    assert repr(value) in str(caught.value)
    assert all(name in caught.value.fix for name in (*STYLES, "PackedRowwiseParallel"))


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (PackedColwiseParallel([1, 1]), "PackedColwiseParallel([1, 1])"),
        (PackedRowwiseParallel(), "PackedRowwiseParallel()"),
        (DivideAttributes("heads"), "DivideAttributes('heads')"),
        (DivideAttributes(), "DivideAttributes()"),
    ],
)
def test_label_is_what_a_plan_would_write(style: Style, text: str) -> None:
    assert style.label == text
