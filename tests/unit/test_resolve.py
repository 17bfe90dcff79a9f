"""Resolving a plan: patterns to modules to layouts, every fault of a plan at once, and no change to the model."""

import copy
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from shardwise.errors import Finding, PlanError
from shardwise.plan.layout import Replicated, Shard
from shardwise.plan.meta import meta_parameters
from shardwise.plan.resolve import ResolvedPlan, pattern_of, resolve
from shardwise.plan.styles import DivideAttributes, PackedColwiseParallel, PackedRowwiseParallel
from shardwise.plan.subject import LARGE
from tests.helpers import FAMILIES, family, tiny_skeleton

HANDED_OVER = {
    "HunyuanDiT2DModel": [f"time_extra_emb.pooler.{name}_proj" for name in ("k", "q", "v", "c")],
}
"""Large Linears whose weights the model's code hands to a function: no style can speak for them, they stay whole."""

SPLIT = '"rowwise_split_input"'

PLAN = {
    "blocks.*.attn.to_q": "colwise",
    "blocks.*.attn.to_out": "rowwise",
    "blocks.*.up": PackedColwiseParallel([1, 1]),
    "blocks.*.down": "rowwise",
    "modulation": "rowwise_split_input",
}


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(16, 24)
        self.to_out = nn.Linear(24, 16)


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attn = Attention(heads)
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(32, 16)


class Model(nn.Module):
    """Three equal blocks, a modulation, and the containers that a wildcard does not stand for."""

    def __init__(self, heads: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(heads) for _ in range(3))
        self.modulation = nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.sequence = nn.Sequential(nn.Linear(16, 16))
        self.table = nn.ModuleDict({"a": nn.Linear(16, 16)})


def findings(plan: Mapping[object, object], degree: int = 2, model: nn.Module | None = None) -> list[Finding]:
    with pytest.raises(PlanError) as caught:
        resolve(model or Model(), plan, degree)
    return list(caught.value.findings)


def paths(plan: Mapping[str, object], model: nn.Module | None = None) -> list[str]:
    return [module.path for module in resolve(model or Model(), plan, 2).modules]


# ---------------------------------------------------------------- patterns


def test_P1_key_without_wildcard_is_a_path_in_the_model() -> None:
    assert paths({"blocks.1.up": "colwise"}) == ["blocks.1.up"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks.*.up", ["blocks.0.up", "blocks.1.up", "blocks.2.up"]),
        ("*", ["0", "1"]),
        ("inner.*", ["inner.0", "inner.1"]),
    ],
)
def test_P2_wildcard_stands_for_every_element_of_a_module_list(pattern: str, expected: list[str]) -> None:
    pair = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    model = {"*": pair, "inner.*": nn.ModuleDict({"inner": pair})}.get(pattern)
    assert paths({pattern: "colwise"}, model) == expected


def test_P2_wildcard_reaches_beyond_nine_elements() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(12))})
    assert paths({"blocks.*": "colwise"}, model) == [f"blocks.{i}" for i in range(12)]


def test_wildcard_skips_blocks_that_lack_the_child() -> None:
    model = Model()
    del model.blocks[1].up
    assert paths({"blocks.*.up": "colwise"}, model) == ["blocks.0.up", "blocks.2.up"]


@pytest.mark.parametrize("key", ["blocks.*.attn.*", "*.*", "blocks.**.up", "blocks.*.to_*"])
def test_P2_two_wildcards_are_refused(key: str) -> None:
    (finding,) = findings({key: "colwise"})
    assert (finding.kind, finding.plan_key) == ("TwoWildcards", key)


@pytest.mark.parametrize(
    ("key", "container"),
    [
        ("sequence.*", "Sequential"),
        ("table.*", "ModuleDict"),
        ("*.up", "Model"),
        ("blocks.0.*", "Block"),
        ("modulation.*", "Linear"),
    ],
)
def test_P2_wildcard_over_what_is_no_module_list_is_refused(key: str, container: str) -> None:
    (finding,) = findings({key: "colwise"})
    assert (finding.kind, finding.plan_key) == ("NotAModuleList", key)
    assert finding.message.endswith(f"is a {container}")


@pytest.mark.parametrize(
    "key",
    [
        "blocks.*.upp",
        "block.*.up",
        "blocks*.up",
        "blocks.*up",
        "blocks.1*.up",
        "blocks.7.up",
        "blocks..up",
        "blocks.*.",
        " blocks.*.up",
        "blocks.0.up.weight",
    ],
)
def test_P1_key_that_matches_nothing_is_refused(key: str) -> None:
    (finding,) = findings({key: "colwise"})
    assert (finding.kind, finding.plan_key) == ("UnmatchedKey", key)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("blocks.*.atn.to_q", "'blocks.*.attn.to_q'"),
        ("block.*.up", "'blocks.*.up'"),
        ("modulations", "'modulation'"),
        ("zzzzzzzz", "take the key out"),
    ],
)
def test_P1_unmatched_key_is_told_what_looks_like_it(key: str, hint: str) -> None:
    (finding,) = findings({key: "colwise"})
    assert hint in finding.fix


@pytest.mark.parametrize("plan", [None, "colwise", [("modulation", "colwise")], {"modulation"}])
def test_P1_plan_that_is_no_mapping_is_refused(plan: object) -> None:
    (finding,) = findings(plan)
    assert finding.kind == "NotAPlan"
    assert type(plan).__name__ in finding.message


@pytest.mark.parametrize("key", [3, None, ("blocks", "up")])
def test_P1_key_that_is_no_string_is_refused(key: object) -> None:
    assert [finding.kind for finding in findings({key: "colwise"})] == ["BadKey"]


@pytest.mark.parametrize("second", ["rowwise_split_input", PackedColwiseParallel([1, 1]), "colwise"])
def test_path_matched_by_two_keys_is_refused(second: object) -> None:
    (finding,) = findings({"blocks.*.up": "colwise", "blocks.1.up": second})
    assert (finding.kind, finding.module, finding.plan_key) == ("MatchedTwice", "blocks.1.up", "blocks.1.up")
    assert '"blocks.*.up"' in finding.message


@pytest.mark.parametrize(
    ("key", "style", "kind"),
    [
        ("blocks.*.norm", "colwise", "NotALinear"),
        ("blocks.*.attn", "rowwise", "NotALinear"),
        ("", "colwise", "NotALinear"),
        ("blocks.*.up", "columnwise", "UnknownStyle"),
        ("blocks.*.up", None, "UnknownStyle"),
        ("blocks.*.up", PackedColwiseParallel(), "NoBlocks"),
        ("blocks.*.up", PackedColwiseParallel([1, 2]), "BadBlocks"),
        ("blocks.*.attn", DivideAttributes("head_count"), "NoSuchAttribute"),
    ],
)
def test_style_that_does_not_fit_its_module_is_refused_at_its_key(key: str, style: object, kind: str) -> None:
    (finding,) = findings({key: style})
    assert (finding.kind, finding.plan_key) == (kind, key)


@pytest.mark.parametrize("blocks", [[1, 0], [], "ab", [0.5, 0.5], 2])
def test_P8_marker_with_bad_blocks_is_a_finding_like_any_other(blocks: object) -> None:
    marker = type("PackedColwiseParallel", (), {"blocks": blocks})()
    kinds = [finding.kind for finding in findings({"blocks.*.up": marker, "modulatio": "colwise"})]
    assert len(kinds) == 2
    assert "UnmatchedKey" in kinds


# ---------------------------------------------------------------- layouts


def test_layouts_name_every_planned_parameter_in_full() -> None:
    assert resolve(Model(), {"sequence.0": "colwise", "modulation": "rowwise"}, 2).layouts == {
        "sequence.0.weight": Shard(0, (16,)),
        "sequence.0.bias": Shard(0, (16,)),
        "modulation.weight": Shard(1, (8,)),
        "modulation.bias": Replicated(),
    }


@pytest.mark.parametrize("name", ["scale", "blocks.0.norm.weight", "blocks.0.norm.bias", "sequence.0.weight"])
def test_P10_parameters_that_are_not_planned_are_replicated(name: str) -> None:
    resolved = resolve(Model(), PLAN, 2)
    assert resolved.layout(name) == Replicated()
    assert resolved.layout("blocks.0.up.weight") != Replicated()


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_attributes_hold_the_values_of_a_rank(degree: int) -> None:
    resolved = resolve(Model(), PLAN, degree)
    local = {module.path: module.values(0, degree) for module in resolved.modules}
    assert resolved.degree == degree
    assert local["blocks.0.attn.to_q"] == {"out_features": 24 // degree}
    assert local["blocks.2.down"] == {"in_features": 32 // degree}
    assert local["modulation"] == {"in_features": 8 // degree}
    assert local["blocks.0.attn"] == {"heads": 8 // degree}


def test_plan_of_the_model_itself_names_parameters_without_a_dot() -> None:
    assert set(resolve(nn.Linear(4, 4), {"": "colwise"}, 2).layouts) == {"weight", "bias"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("degree", [2, 4])
def test_P11_shipped_plan_fits_its_models_and_every_key_is_used_in_one(name: str, degree: int) -> None:
    """Optional keys too: one that never matches would be a typo that nothing reports."""
    module, used = family(name), set()
    for variant in ["", *getattr(module, "TINY_VARIANTS", {})]:
        model = tiny_skeleton(name, variant)
        resolved = resolve(model, module.PLAN, degree)
        used |= {planned.plan_key for planned in resolved.modules}
        shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
        for key, layout in resolved.layouts.items():
            if isinstance(layout, Shard):
                assert layout.size == shapes[key][layout.dim]
    assert used == set(module.PLAN)


@pytest.mark.parametrize("name", FAMILIES)
def test_P10_lone_projection_is_split_if_it_holds_a_thousandth_of_the_default_model(name: str) -> None:
    module = family(name)
    with meta_parameters():
        model = getattr(module, name)(**getattr(module, "RELEASED_CONFIG", {}))
    modules = dict(model.named_modules())
    labels = {m.path: m.style.label for m in resolve(model, module.PLAN, 1).modules if m.layouts}
    lone: Counter[str] = Counter()
    for path, layer in modules.items():
        # A convolution that is in no group may stay whole; one that is planned must be large.
        if labels.get(path, SPLIT if isinstance(layer, nn.Linear) else "") == SPLIT:
            lone[pattern_of(modules, path)] += sum(p.numel() for p in layer.parameters())
    total = sum(p.numel() for p in model.parameters())
    split = {pattern_of(modules, path) for path, label in labels.items() if label == SPLIT}
    large = {key for key, size in lone.items() if size >= LARGE * total}
    assert split == large - set(HANDED_OVER.get(name, []))
    assert set(HANDED_OVER.get(name, [])) <= large


# ---------------------------------------------------------------- divisibility, and all faults at once


def test_E5_E6_packed_block_is_refused_with_place_axis_size_and_degrees() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(8, 40) for _ in range(2))})
    with pytest.raises(PlanError) as caught:
        resolve(model, {"blocks.*": PackedColwiseParallel([1, 3])}, 4)
    assert str(caught.value) == (
        "2 problems in the tensor parallel plan of ModuleDict at tp_degree 4\n"
        'IndivisibleBlock: blocks.0 (plan key "blocks.*") x2\n'
        "  block 1 of 2 has 10 rows; 10 is not divisible by tp_degree 4\n"
        "  fix: use a degree that divides every block: 1, 2, 5, 10\n"
        'IndivisibleBlock: blocks.0 (plan key "blocks.*") x2\n'
        "  block 2 of 2 has 30 rows; 30 is not divisible by tp_degree 4\n"
        "  fix: use a degree that divides every block: 1, 2, 5, 10\n"
        "degrees that fit the whole plan: 1, 2, 5, 10"
    )


def test_E5_columns_of_a_packed_rowwise_weight_are_counted_as_columns() -> None:
    (finding,) = findings({"blocks.*.down": PackedRowwiseParallel([3, 13])}, degree=13)[:1]
    assert finding.message == "block 1 of 2 has 6 columns; 6 is not divisible by tp_degree 13"


def test_P5_lone_projection_stays_whole_where_the_degree_does_not_divide_its_input() -> None:
    others = {"sequence.0": "colwise"}
    found = resolve(Model(), {**others, "modulation": "rowwise_split_input"}, 16)  # of 8 columns
    assert found.layouts == {"sequence.0.weight": Shard(0, (16,)), "sequence.0.bias": Shard(0, (16,))}
    assert [m.path for m in found.modules] == ["sequence.0"]
    (finding,) = findings({**others, "modulation": "rowwise"}, 16)
    assert (finding.kind, finding.module) == ("IndivisibleBlock", "modulation")


def test_L2_E4_degrees_that_fit_divide_heads_and_blocks_of_the_whole_plan() -> None:
    with pytest.raises(PlanError) as caught:
        resolve(Model(heads=12), PLAN, 16)
    assert caught.value.degrees == (1, 2, 4)  # heads 12, widths 24 and 32
    for degree in range(1, 13):
        fits = degree in caught.value.degrees
        assert fits or findings(PLAN, degree, Model(heads=12))
        assert not fits or isinstance(resolve(Model(heads=12), PLAN, degree), ResolvedPlan)


def test_all_faults_of_a_plan_are_reported_together() -> None:
    plan = {
        **PLAN,
        "blocks.*.upp": "colwise",
        "blocks.*.*": "colwise",
        "sequence.*": "colwise",
        "blocks.1.norm": "rowwise",
        "blocks.2.up": "colwise",
        "table.a": "diagonal",
    }
    kinds = {finding.kind for finding in findings(plan, degree=16, model=Model(heads=6))}
    assert kinds == {
        "UnmatchedKey",
        "TwoWildcards",
        "NotAModuleList",
        "NotALinear",
        "MatchedTwice",
        "UnknownStyle",
        "IndivisibleBlock",
        "IndivisibleHeads",
    }


def test_faults_that_repeat_from_block_to_block_are_one_with_a_count() -> None:
    (finding,) = findings({"blocks.*.norm": "colwise"})
    assert (finding.module, finding.count) == ("blocks.0.norm", 3)


def test_faults_of_different_keys_stay_apart() -> None:
    found = findings({"blocks.0.norm": "colwise", "blocks.1.norm": "colwise"})
    assert [(finding.module, finding.count) for finding in found] == [
        ("blocks.0.norm", 1),
        ("blocks.1.norm", 1),
    ]


# ---------------------------------------------------------------- shared parameters and modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight


@pytest.mark.parametrize(
    "plan",
    [
        {"first": "colwise"},
        {"second": "rowwise"},
        {"first": "colwise", "second": "rowwise"},
        {"first": "colwise", "second": PackedColwiseParallel([1, 1])},
    ],
)
def test_shared_parameter_cut_in_two_ways_is_refused(plan: dict[str, object]) -> None:
    (finding,) = findings(plan, model=Tied())
    assert (finding.kind, finding.module) == ("SharedParameter", "first.weight")
    assert "second.weight" in finding.message


def test_shared_parameter_cut_alike_is_accepted() -> None:
    layouts = resolve(Tied(), {"first": "rowwise", "second": "rowwise"}, 2).layouts
    assert layouts == {"first.weight": Shard(1, (8,)), "second.weight": Shard(1, (8,))}


def test_one_module_used_twice_in_a_list_is_planned_under_both_names() -> None:
    block = nn.Linear(8, 8)
    model = nn.ModuleDict({"blocks": nn.ModuleList([block, block])})
    assert paths({"blocks.*": "colwise"}, model) == ["blocks.0", "blocks.1"]


def test_module_planned_under_one_of_its_names_has_its_layout_under_all() -> None:
    model = Model()
    model.first = model.blocks[0]
    layouts = resolve(model, {"blocks.*.up": "colwise"}, 2).layouts
    assert layouts["first.up.weight"] == layouts["blocks.0.up.weight"] == Shard(0, (64,))


def test_one_module_under_two_keys_of_different_styles_is_refused() -> None:
    model = Model()
    model.first = model.blocks[0].up
    (finding,) = findings({"blocks.*.up": "colwise", "first": PackedColwiseParallel([1, 1])}, model=model)
    assert (finding.kind, finding.module) == ("MatchedTwice", "first")


def test_one_module_under_two_keys_of_the_same_style_is_accepted() -> None:
    model = Model()
    model.first = model.blocks[0].up
    assert paths({"blocks.*.up": "colwise", "first": "colwise"}, model)[-1] == "first"


# ---------------------------------------------------------------- what resolving leaves alone


def snapshot(model: nn.Module) -> list[tuple[object, ...]]:
    return [
        (path, type(module), {k: v for k, v in vars(module).items() if not k.startswith("_")})
        for path, module in model.named_modules()
    ]


@pytest.mark.parametrize(("degree", "plan"), [(2, PLAN), (16, {**PLAN, "blocks.*.upp": "colwise"})])
def test_E7_resolving_changes_neither_the_model_nor_the_plan(degree: int, plan: dict[str, object]) -> None:
    model = Model()
    before, weights = snapshot(model), copy.deepcopy(model.state_dict())
    given = dict(plan)
    try:
        resolve(model, given, degree)
    except PlanError:
        assert degree == 16
    assert snapshot(model) == before
    assert given == plan
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_E7_second_call_with_a_right_degree_works() -> None:
    model = Model()
    assert findings(PLAN, 16, model)
    assert resolve(model, PLAN, 2).layouts == resolve(Model(), PLAN, 2).layouts


def test_L4_resolving_needs_no_weights() -> None:
    with meta_parameters():
        model = Model()
    assert resolve(model, PLAN, 4) == resolve(Model(), PLAN, 4)
    assert all(parameter.is_meta for parameter in model.parameters())
