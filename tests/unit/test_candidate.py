"""A plan from the names of modules: the declared plans found again, what each rule reads, and what it does not dare."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import shardwise
from shardwise import PackedColwiseParallel, PackedRowwiseParallel, SliceOutput, infer
from shardwise.cli import main
from shardwise.errors import PlanError
from shardwise.models.lookup import skeleton
from shardwise.plan import candidate as candidate_module
from shardwise.plan import names
from shardwise.plan.candidate import Candidate, candidate
from shardwise.plan.names import RULES, attentions
from shardwise.plan.names.feed_forwards import FEED_FORWARDS, ONLY_INSIDE
from tests.adapters import load_flux_adapters, load_sd3_adapter
from tests.found_plans import THIRTEEN, Difference, difference, model_of
from tests.helpers import tiny_model
from tests.small_models import Mlp

# --- the shipped families, as if nothing were known of them -------------------------------------------------------


@pytest.mark.parametrize("name", THIRTEEN)
def test_declared_plan_is_found_by_names_and_right(name: str) -> None:
    model, inputs = model_of(name).model, model_of(name).inputs
    found = candidate(model, 2)
    assert difference(name, found.plan) == Difference()
    assert not found.whole
    assert shardwise.check(model, found.plan, 2, inputs).ok


def test_without_example_inputs_a_plan_is_found_by_names_and_not_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "LTXVideoTransformer3DModel"
    assert infer(name).proved
    monkeypatch.setattr("shardwise.models.inference.known_inputs", lambda model: None)
    found = infer(name)
    assert isinstance(found, Candidate)
    assert not found.proved
    assert found.plan == candidate(model_of(name).model, 2).plan


@pytest.mark.parametrize(
    ("name", "load"),
    [("FluxTransformer2DModel", load_flux_adapters), ("SD3Transformer2DModel", load_sd3_adapter)],
)
def test_adapter_in_an_attention_follows_and_is_not_whole(name: str, load: Callable[[Any], None]) -> None:
    model, without = tiny_model(name), candidate(model_of(name).model, 2)
    load(model)
    found = candidate(model, 2)
    assert found.plan.items() >= without.plan.items()
    assert not any("transformer_blocks" in key for key in found.whole)
    assert shardwise.check(model, found.plan, 2).ok


# --- classes without a plan ----------------------------------------------------------------------------------------

WHOLE: dict[str, dict[str, str]] = {
    "AuraFlowTransformer2DModel": {},
    "CosmosTransformer3DModel": {},
    "JoyImageEditTransformer3DModel": {},
    "Kandinsky5Transformer3DModel": {},
    "StableAudioDiTModel": {},
    "DiTTransformer2DModel": dict.fromkeys(
        ("timestep_embedder.linear_1", "timestep_embedder.linear_2"), "its name says nothing"
    ),
    "MochiTransformer3DModel": {
        **dict.fromkeys(
            ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
            "pos_frequencies [3, 24, 64], outside of it, may hold a part for each of its 24 heads",
        ),
        "norm1_context.linear_1": "a modulation of less than 0.1% of the weights",
    },
    "OvisImageTransformer2DModel": dict.fromkeys(
        ("to_q", "to_k", "to_v", "proj_mlp", "proj_out"),
        "proj_mlp: 24576 features, of which half are read, and nothing is called a gated unit",
    ),
}
"""What stays whole in classes of diffusers at their released sizes, by the end of its pattern, and why."""


@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole_in_a_class_without_a_plan_is_known(name: str) -> None:
    found = candidate(skeleton(name), 2)
    assert len(found.whole) == len(WHOLE[name])
    for end, reason in WHOLE[name].items():
        (why,) = (why for key, why in found.whole.items() if key.endswith(f".{end}"))
        assert why.startswith(reason)


# --- blocks that are made of names ---------------------------------------------------------------------------------

WIDTH, HEADS, HIDDEN = 48, 4, 40

Sizes = dict[str, tuple[int, int]]
"""Name of a Linear -> the features that it reads and makes."""


class DoubledNorm(nn.RMSNorm):
    """A norm with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


ATTENTION: Sizes = dict.fromkeys(("to_q", "to_k", "to_v", "to_out.0"), (WIDTH, WIDTH))
QKV = dict.fromkeys(("to_q", "to_k", "to_v"), "colwise") | {"to_out.0": "rowwise"}


def put(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Set a module under a dotted name; what is missing on the way is a list."""
    first, _, rest = name.partition(".")
    if rest:
        if first not in owner._modules:
            owner.add_module(first, nn.ModuleDict())
        put(owner.get_submodule(first), rest, module)
    else:
        owner.add_module(first, module)


def made_of(linears: Sizes, cls: type[nn.Module] = nn.Module, **others: Any) -> nn.Module:
    """Return a module of Linears and of other modules and attributes."""
    module = cls()
    for name, sizes in linears.items():
        put(module, name, nn.Linear(*sizes))
    for name, value in others.items():
        put(module, name, value) if isinstance(value, nn.Module) else setattr(module, name, value)
    return module


def attention(changes: Sizes | None = None, heads: int = HEADS, **others: Any) -> nn.Module:
    return made_of({**ATTENTION, **(changes or {})}, heads=heads, **others)


def in_blocks(*makers: Callable[[], nn.Module], name: str = "part") -> nn.Module:
    """Return a model of one block for each maker, each with its module under `name`."""
    model = nn.Module()
    model.blocks = nn.ModuleList(made_of({}, **{name: make()}) for make in makers)
    return model


def found_in(make: Callable[[], nn.Module], name: str = "part", degree: int = 2) -> tuple[Any, Any]:
    """Return what is planned in two blocks that have such a module, and why the rest is whole; by name in it.

    Beside it is a feed-forward, so that something can always be planned.
    """
    model = in_blocks(make, make, name=name)
    for block in model.blocks:
        put(block, "other", made_of({"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}))
    found = candidate(model, degree)
    start = f"blocks.*.{name}."
    planned, whole = (
        {key.removeprefix(start): value for key, value in part.items() if key.startswith(start)}
        for part in (found.plan, found.whole)
    )
    return planned, whole


def planned_in(make: Callable[[], nn.Module], name: str = "part") -> Any:
    planned, whole = found_in(make, name)
    assert not whole
    return planned


def why_whole(make: Callable[[], nn.Module], name: str = "part") -> str:
    """Return the one reason for which nothing of a module is planned."""
    planned, whole = found_in(make, name)
    assert not planned
    (reason,) = set(whole.values())
    return str(reason)


# --- attentions ----------------------------------------------------------------------------------------------------


def rms(width: int) -> nn.Module:
    return nn.RMSNorm(width)


def twins() -> Sizes:
    streams = dict.fromkeys(("add_q_proj", "add_k_proj", "add_v_proj"), (20, WIDTH))
    return {**streams, "to_add_out": (WIDTH, 20)}


def renamed(*new: str) -> Callable[[], nn.Module]:
    return lambda: made_of(dict.fromkeys(new, (WIDTH, WIDTH)), num_heads=HEADS)


def declares(linear: nn.Linear, **blocks: list[int]) -> nn.Linear:
    vars(linear).update({f"_tp_packed_{side}_blocks": sizes for side, sizes in blocks.items()})
    return linear


def fused_with_mlp() -> nn.Module:
    part = made_of({}, heads=HEADS)
    put(part, "to_qkv_mlp_proj", declares(nn.Linear(20, 3 * WIDTH + 80), col=[WIDTH] * 3 + [40] * 2))
    put(part, "to_out", declares(nn.Linear(WIDTH + 40, 20), row=[WIDTH, 40]))
    return part


PACKED_3 = PackedColwiseParallel([1, 1, 1])
TWIN_STYLES = dict.fromkeys(("add_q_proj", "add_k_proj", "add_v_proj"), "colwise") | {"to_add_out": "rowwise"}

ATTENTIONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (attention, QKV),
    "two streams": (lambda: attention(twins()), QKV | TWIN_STYLES),
    "keys of fewer heads": (lambda: attention({"to_k": (20, 24), "to_v": (20, 24)}), QKV),
    "other words": (
        renamed("to_query", "to_key", "to_value", "out_layer"),
        dict.fromkeys(("to_query", "to_key", "to_value"), "colwise") | {"out_layer": "rowwise"},
    ),
    "short words": (
        renamed("wq", "wk", "wv", "wo"),
        dict.fromkeys(("wq", "wk", "wv"), "colwise") | {"wo": "rowwise"},
    ),
    "o_proj": (
        renamed("q_proj", "k_proj", "v_proj", "o_proj"),
        dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise") | {"o_proj": "rowwise"},
    ),
    "all in one": (
        lambda: made_of({"qkv": (20, 3 * WIDTH), "proj": (WIDTH, 20)}, num_heads=HEADS),
        {"qkv": PACKED_3, "proj": "rowwise"},
    ),
    "keys and values in one": (
        lambda: made_of(
            {"to_q": (20, WIDTH), "to_kv": (20, 2 * WIDTH), "to_out": (WIDTH, 20)}, num_heads=HEADS
        ),
        {"to_q": "colwise", "to_kv": PackedColwiseParallel([1, 1]), "to_out": "rowwise"},
    ),
    "declared blocks": (
        fused_with_mlp,
        {"to_qkv_mlp_proj": PackedColwiseParallel(), "to_out": PackedRowwiseParallel()},
    ),
    "a gate over features": (lambda: attention({"to_gate": (WIDTH, WIDTH)}), QKV | {"to_gate": "colwise"}),
    "a gate over heads": (lambda: attention({"to_gate": (WIDTH, HEADS)}), QKV | {"to_gate": "colwise"}),
    "norms over a head": (lambda: attention(norm_q=rms(12), k_norm=nn.LayerNorm(12)), QKV),
    "norms over all heads": (
        lambda: attention(norm_q=rms(48), norm_added_k=rms(48)),
        QKV | {"norm_q": "across_head_norm", "norm_added_k": "across_head_norm"},
    ),
    "a norm over all of fewer heads": (
        lambda: attention({"to_k": (20, 24), "to_v": (20, 24)}, norm_k=rms(24)),
        QKV | {"norm_k": "across_head_norm"},
    ),
    "a LayerNorm over all heads": (
        lambda: attention(norm_q=nn.LayerNorm(WIDTH)),
        QKV | {"norm_q": "across_head_norm"},
    ),
    "a norm in front": (lambda: attention(pre_norm_q=nn.LayerNorm(WIDTH)), QKV),
    "nothing learnt": (lambda: attention(dropout=nn.Dropout(), norm_k=nn.Identity()), QKV),
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_is_told_by_its_names(case: str) -> None:
    make, expected = ATTENTIONS[case]
    assert planned_in(make) == expected


class Subclass(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def without_output() -> nn.Module:
    return made_of(dict.fromkeys(("to_q", "to_k", "to_v"), (WIDTH, WIDTH)), heads=HEADS)


UNCLEAR: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a Linear": (lambda: attention({"to_bias": (WIDTH, HEADS)}), "what its to_bias is for cannot be told"),
    "a gate of another size": (lambda: attention({"to_gate": (WIDTH, 7)}), "what its to_gate is for"),
    "a parameter": (lambda: attention(scale=nn.Parameter(torch.ones(3))), "a parameter of its own, scale"),
    "a table": (lambda: attention(table=nn.Embedding(7, HEADS)), "what its table is for, a Embedding"),
    "a norm of nothing known": (
        lambda: attention(sub_norm=rms(WIDTH)),
        "what its sub_norm is for, a RMSNorm",
    ),
    "a norm of another width": (lambda: attention(norm_q=rms(16)), "norm_q is over 16 features, not those"),
    "a norm of unknown width": (
        lambda: attention(norm_q=nn.GroupNorm(4, 48, affine=False)),
        "norm_q is over unknown features",
    ),
    "a norm of a formula of its own": (
        lambda: attention(norm_q=DoubledNorm(WIDTH)),
        "NotAKnownNorm: the style",
    ),
    "queries twice as wide": (lambda: attention({"to_q": (WIDTH, 96)}), "and its heads have 96"),
    "keys wider than queries": (
        lambda: attention({"to_k": (WIDTH, 96)}),
        "its to_k makes 96 features, and its heads have 48: they are not k alone",
    ),
    "more than q, k and v in one": (
        lambda: made_of({"to_qkv": (20, 5 * WIDTH), "to_out": (WIDTH, 20)}, heads=HEADS),
        "its to_out reads 48 features, and its heads have 80",
    ),
    "more than k and v in one": (
        lambda: made_of({"to_q": (20, WIDTH), "to_kv": (20, 3 * WIDTH), "to_out": (WIDTH, 20)}, heads=HEADS),
        "its to_kv makes 144 features, and its heads have 48: they are not k and v alone",
    ),
    "more by its name": (
        lambda: made_of({"to_qkv_mlp_proj": (20, 3 * WIDTH), "to_out": (WIDTH, 20)}, heads=HEADS),
        "its to_qkv_mlp_proj may make more than q and k and v, and declares no blocks",
    ),
    "no output": (without_output, "none of its Linears reads its heads"),
    "no head count": (lambda: made_of(ATTENTION), "HeadsNotFound: its projections are sharded"),
    "heads that two ranks cannot share": (lambda: attention(heads=3), "IndivisibleHeads: heads is 3"),
    "a Linear with a forward of its own": (
        lambda: attention(to_q=Subclass(WIDTH, WIDTH)),
        "NotALinear: the style",
    ),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_attention_with_something_unclear_stays_whole(case: str) -> None:
    make, reason = UNCLEAR[case]
    assert reason in why_whole(make)


@pytest.mark.parametrize("where", ["block", "model"])
@pytest.mark.parametrize(
    ("shape", "whole"), [((3, HEADS, 5), True), ((HEADS,), True), ((HEADS, WIDTH), False)]
)
def test_parameter_outside_with_a_part_for_each_head_keeps_an_attention_whole(
    where: str, shape: tuple[int, ...], whole: bool
) -> None:
    model = in_blocks(attention, attention)
    holder = model if where == "model" else model.blocks[1]
    holder.gates = nn.Parameter(torch.ones(shape))
    if whole:
        with pytest.raises(PlanError, match="may hold a part for each of its 4 heads"):
            candidate(model, 2)
    else:
        assert candidate(model, 2).plan


def test_module_with_queries_and_no_keys_is_no_attention() -> None:
    assert why_whole(lambda: made_of({"to_q": (WIDTH, WIDTH), "to_out": (WIDTH, WIDTH)}, heads=HEADS)) == (
        "its name says nothing"
    )


class SwiGLU(nn.Module):
    """An activation that halves its input."""


def single_block(mlp: int, out: int, **others: Any) -> nn.Module:
    """A block whose last Linear reads attention and MLP together."""
    block = made_of({"proj_mlp": (WIDTH, mlp), "proj_out": (out, WIDTH)}, **others)
    put(block, "attn", without_output())
    return block


@pytest.mark.parametrize(
    ("mlp", "others", "style"),
    [(120, {}, "colwise"), (240, {"act_mlp": SwiGLU()}, PackedColwiseParallel([1, 1]))],
)
def test_attention_without_an_output_closes_with_the_mlp_beside_it(
    mlp: int, others: Any, style: object
) -> None:
    assert planned_in(lambda: single_block(mlp, WIDTH + 120, **others)) == {
        "proj_mlp": style,
        "proj_out": PackedRowwiseParallel([2, 5]),
        **dict.fromkeys(("attn.to_q", "attn.to_k", "attn.to_v"), "colwise"),
    }


def test_blocks_that_are_declared_are_left_to_the_model() -> None:
    def make() -> nn.Module:
        block = single_block(120, WIDTH + 120)
        declares(block.get_submodule("proj_out"), row=[WIDTH, 120])
        return block

    assert planned_in(make)["proj_out"] == PackedRowwiseParallel()


@pytest.mark.parametrize(
    ("mlp", "out", "reason"),
    [
        (
            240,
            WIDTH + 120,
            "proj_mlp: 240 features, of which half are read, and nothing is called a gated unit",
        ),
        (100, WIDTH + 120, "proj_mlp: 100 features, of which 120 are read"),
        (120, 24, "proj_out reads 24 features, and its heads have 48"),
    ],
)
def test_mlp_beside_an_attention_that_does_not_fit_keeps_both_whole(mlp: int, out: int, reason: str) -> None:
    assert reason in why_whole(lambda: single_block(mlp, out))


# --- feed-forwards -------------------------------------------------------------------------------------------------


def pair(firsts: tuple[str, ...], last: str, made: int = HIDDEN, read: int = HIDDEN) -> nn.Module:
    return made_of(dict.fromkeys(firsts, (WIDTH, made)) | {last: (read, WIDTH)})


@pytest.mark.parametrize(("firsts", "last"), [*FEED_FORWARDS, *ONLY_INSIDE])
def test_feed_forward_of_each_family_is_told_by_its_names(firsts: tuple[str, ...], last: str) -> None:
    fused = firsts == ("gate_up_proj",)
    made, style = (2 * HIDDEN, PackedColwiseParallel([1, 1])) if fused else (HIDDEN, "colwise")
    planned = planned_in(lambda: pair(firsts, last, made), name="ff_context")
    assert planned == dict.fromkeys(firsts, style) | {last: "rowwise"}


@pytest.mark.parametrize(("firsts", "last"), ONLY_INSIDE)
def test_names_that_others_have_too_are_taken_only_inside_of_a_feed_forward(
    firsts: tuple[str, ...], last: str
) -> None:
    assert why_whole(lambda: pair(firsts, last), name="shortcut") == "its name says nothing"


def test_timestep_embedder_inside_of_a_block_stays_whole() -> None:
    assert why_whole(lambda: pair(("linear_1",), "linear_2")) == "its name says nothing"


class GEGLU(nn.Module):
    """The module that owns the Linear whose output it halves."""


def gated(made: int, cls: type[nn.Module] = GEGLU) -> nn.Module:
    return made_of({"net.2": (HIDDEN, WIDTH)}, **{"net.0": made_of({"proj": (WIDTH, made)}, cls)})


def fused(made: int, **others: Any) -> nn.Module:
    return made_of({"linear_in": (WIDTH, made), "linear_out": (HIDDEN, WIDTH)}, **others)


@pytest.mark.parametrize(
    "make",
    [lambda: gated(2 * HIDDEN), lambda: fused(2 * HIDDEN, act_fn=SwiGLU())],
    ids=["owner", "activation"],
)
def test_gate_and_value_in_one_are_two_blocks_where_a_class_says_so(make: Any) -> None:
    assert sorted(map(str, planned_in(make, "ff").values())) == [
        str(PackedColwiseParallel([1, 1])),
        "rowwise",
    ]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: gated(2 * HIDDEN, nn.Module), "half are read, and nothing is called a gated unit"),
        (lambda: fused(2 * HIDDEN, act_fn=nn.SiLU()), "half are read, and nothing is called a gated unit"),
        (lambda: gated(HIDDEN), "40 are read after GEGLU"),
        (
            lambda: fused(3 * HIDDEN, act_fn=SwiGLU()),
            "linear_in: 120 features, of which 40 are read after SwiGLU",
        ),
        (lambda: fused(HIDDEN, norm=nn.LayerNorm(HIDDEN)), "its norm looks at all 40 features between"),
        (lambda: pair(("w1", "w3"), "w2", 44), "w1, w3: 44 features, of which 40 are read"),
    ],
)
def test_feed_forward_whose_sizes_say_otherwise_stays_whole(make: Any, reason: str) -> None:
    assert reason in why_whole(make, "ff")


def test_norm_of_the_input_of_a_feed_forward_is_none_between_its_linears() -> None:
    planned = planned_in(lambda: fused(HIDDEN, norm=nn.LayerNorm(WIDTH)), "ff")
    assert planned == {"linear_in": "colwise", "linear_out": "rowwise"}


def sequence(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), *between, nn.Linear(HIDDEN, WIDTH))


def test_sequence_that_is_called_a_feed_forward_is_one() -> None:
    assert planned_in(lambda: sequence(nn.GELU(), nn.Dropout()), "ffn") == {"0": "colwise", "3": "rowwise"}


@pytest.mark.parametrize(
    ("name", "between", "reason"),
    [
        ("embed", nn.GELU(), "its name says nothing"),
        ("ffn", nn.LayerNorm(HIDDEN), "its name says nothing"),
        ("ffn", nn.LayerNorm(HIDDEN, elementwise_affine=False), "its 1 looks at all 40 features"),
    ],
)
def test_sequence_that_is_not_called_one_or_has_a_norm_stays_whole(
    name: str, between: nn.Module, reason: str
) -> None:
    assert reason in why_whole(lambda: sequence(between), name)


# --- modulations ---------------------------------------------------------------------------------------------------


class AdaLayerNormZero(nn.Module):
    """A norm with a Linear of its own."""


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("norm1", lambda: made_of({"linear": (WIDTH, 96)}, AdaLayerNormZero)),
        ("img_mod", lambda: nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 96))),
        ("adaLN_modulation", lambda: nn.Sequential(nn.Linear(WIDTH, 96))),
        ("adaln_proj", lambda: made_of({"linear": (WIDTH, 96)})),
    ],
)
def test_modulation_splits_its_input(name: str, make: Any) -> None:
    assert set(planned_in(make, name).values()) == {"rowwise_split_input"}


def test_modulation_that_is_not_large_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_module, "LARGE", 0.9)
    assert "not worth an all-reduce" in why_whole(lambda: made_of({"linear": (WIDTH, 96)}), "adaln_proj")


def test_modulation_of_an_input_that_the_degree_does_not_divide_stays_whole() -> None:
    assert (
        why_whole(lambda: made_of({"linear": (7, 96)}), "adaln_proj")
        == "tp_degree 2 does not divide what it reads"
    )


# --- rotary tables -------------------------------------------------------------------------------------------------


class RotaryPosEmbed(nn.Module):
    """Makes a table, and keeps over how many features it is."""


def rotated(dim: int, **others: Any) -> nn.Module:
    model = in_blocks(attention, attention)
    put(model, "rope", made_of({}, RotaryPosEmbed, dim=dim, **others))
    return model


def test_rotary_table_over_all_heads_is_sliced() -> None:
    assert candidate(rotated(WIDTH), 2).plan["rope"] == SliceOutput(-1)
    assert "rope" not in candidate(rotated(WIDTH // HEADS), 2).plan


@pytest.mark.parametrize("clear_ones", [0, 1])
def test_rotary_table_that_may_be_laid_out_by_heads_keeps_attentions_whole(clear_ones: int) -> None:
    model = rotated(WIDTH, num_attention_heads=HEADS)
    for i in range(clear_ones):
        put(model, f"rope_{i}", made_of({}, RotaryPosEmbed, dim=WIDTH))
    with pytest.raises(PlanError, match=r"a rotary table over 48 features.*one may be laid out by heads"):
        candidate(model, 2)


def test_rotary_table_that_a_whole_attention_may_read_keeps_the_others_whole() -> None:
    model = rotated(WIDTH)
    for block in model.blocks:
        put(block, "odd", attention({"to_bias": (WIDTH, HEADS)}))
    with pytest.raises(PlanError, match=r"\(rope\), and some attentions of that width are whole"):
        candidate(model, 2)


# --- blocks, and the guards ----------------------------------------------------------------------------------------


def test_child_that_some_blocks_lack_is_planned_in_the_others() -> None:
    plan = candidate(in_blocks(lambda: attention(twins()), attention), 2).plan
    assert plan["blocks.*.part.to_add_out"] == "rowwise"


@pytest.mark.parametrize(
    "other",
    [
        lambda: attention({"to_bias": (WIDTH, HEADS)}),
        lambda: attention(to_q=nn.Identity()),
        lambda: attention(norm_q=rms(12)),
    ],
    ids=["unclear", "no attention", "norm over a head"],
)
def test_blocks_that_differ_stay_whole(other: Any) -> None:
    model = in_blocks(lambda: attention(norm_q=rms(WIDTH)), other)
    assert candidate(in_blocks(lambda: attention(norm_q=rms(WIDTH))), 2).plan
    with pytest.raises(PlanError, match="NothingSharded"):
        candidate(model, 2)


def test_heads_of_the_config_that_the_degree_does_not_divide_are_an_error() -> None:
    with pytest.raises(
        PlanError, match="num_attention_heads is 4; 4 is not divisible by tp_degree 3"
    ) as caught:
        candidate(model_of("WanTransformer3DModel").model, 3)
    assert caught.value.degrees == (1, 2, 4)


def test_names_that_say_nothing_are_an_error_that_says_why() -> None:
    with pytest.raises(PlanError, match="do not say what could be sharded"):
        infer(Mlp())  # its Linears are in no list of blocks
    with pytest.raises(
        PlanError, match=r"StaysWhole: blocks\.\*\.part\n  none of its Linears reads its heads"
    ):
        candidate(in_blocks(without_output), 2)


def test_linear_is_claimed_once() -> None:
    outline = candidate_module.Outline(model_of("FluxTransformer2DModel").model)
    linears = [path for claim in names.claims(outline) for path in claim.linears]
    assert len(linears) == len(set(linears)) > 0


def test_model_that_was_given_stays_as_it_was() -> None:
    model = model_of("Flux2Transformer2DModel").model
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    candidate(model, 2)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before


# --- negative controls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_without_a_rule_declared_plans_are_not_found(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "SD3Transformer2DModel"
    monkeypatch.setattr(names, "RULES", tuple(other for other in RULES if other is not rule))
    assert difference(name, candidate(model_of(name).model, 2).plan) != Difference()


def test_norm_over_all_heads_that_is_not_told_is_found_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    case = model_of("WanTransformer3DModel")
    monkeypatch.setattr(attentions._Attention, "_norms", lambda self: {})
    plan = candidate(case.model, 2).plan
    assert not shardwise.check(case.model, plan, 2, case.inputs).ok


def test_rotary_table_that_is_not_told_is_found_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    case = model_of("LTXVideoTransformer3DModel")
    monkeypatch.setattr(candidate_module, "rotary_tables", lambda outline: [])
    plan = candidate(case.model, 2).plan
    assert not shardwise.check(case.model, plan, 2, case.inputs).ok


# --- what is printed -----------------------------------------------------------------------------------------------


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return what `shardwise plan --infer` prints of a class, as if no example inputs were known for it."""
    monkeypatch.setattr("shardwise.models.inference.known_inputs", lambda model: None)

    def run(*options: str) -> str:
        result = CliRunner().invoke(main, ["plan", "SD3Transformer2DModel", "--infer", *options])
        assert result.exit_code == 0, result.output
        return result.output

    return run


def test_command_says_first_that_a_candidate_is_unproved(printed: Callable[..., str]) -> None:
    text = printed()
    assert text.startswith("unproved: derived from the names of the modules of SD3Transformer2DModel")
    assert "transformer_blocks.*.attn: an attention of 48 features: each rank has some of its heads" in text
    assert '  transformer_blocks.*.ff.net.0.proj: "colwise"' in text


def test_command_says_what_stays_whole(printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "RULES", (names.feed_forward, names.modulation))
    first, *others = ("attn2.to_q", "attn2.to_out.0", "attn.to_add_out")
    (line,) = (line for line in printed().splitlines() if f"transformer_blocks.*.{first}" in line)
    assert all(f"transformer_blocks.*.{other}" in line for other in others)
    assert line.endswith(": whole, because its name says nothing")


def test_command_prints_a_candidate_as_python_under_a_comment(printed: Callable[..., str]) -> None:
    text = printed("--python")
    assert text.startswith("# unproved: ")
    known: dict[str, Any] = {name: getattr(shardwise, name) for name in shardwise.__all__}
    exec(text, known)
    assert known["_tp_plan"] == candidate(model_of("SD3Transformer2DModel").model, 2).plan


def test_command_prints_a_candidate_as_json(printed: Callable[..., str]) -> None:
    report = json.loads(printed("--json", "--tp", "4"))
    assert report["proved"] is False
    assert report["tp_degree"] == 4
    assert report["plan"]["transformer_blocks.*.attn.to_q"] == "colwise"
    kinds = {group["owner"]: group["kind"] for group in report["groups"]}
    assert kinds["transformer_blocks.*.attn2"] == "attention"
    assert kinds["transformer_blocks.*.norm1.linear"] == "modulation"
    assert report["whole"] == {}
