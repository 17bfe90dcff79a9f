"""Attention heads: every sharded attention has its head count divided, or is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwise.errors import PlanError
from shardwise.plan import heads
from shardwise.plan.layout import Shard
from shardwise.plan.resolve import ResolvedPlan, resolve
from shardwise.plan.styles import DivideAttributes, PackedColwiseParallel
from tests.helpers import FAMILIES, family, tiny_skeleton

# Spelled out, so that a name that is lost from the library is noticed here.
HEAD_COUNTS = [
    *("heads", "num_heads", "num_head", "n_heads", "n_head", "nheads", "nhead", "num_attention_heads"),
    *("num_q_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads"),
    "sliceable_head_dim",
]
WIDTHS = ["inner_dim", "inner_kv_dim", "kv_inner_dim", "mlp_hidden_dim"]
HEAD_WIDTHS = ["head_dim", "dim_head", "dim_heads", "attention_head_dim", "d_head"]
CONFIG_HEADS = ["num_attention_heads", "num_key_value_heads", "num_kv_heads"]

QKV = {"attn.to_q": "colwise", "attn.to_k": "colwise", "attn.to_v": "colwise", "attn.to_out.0": "rowwise"}


class Attention(nn.Module):
    """Projections of an attention, with the attributes given."""

    def __init__(self, **attributes: object) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(24, 24) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(24, 24), nn.Dropout(0.0)])
        vars(self).update(attributes)


class FeedForward(nn.Module):
    def __init__(self, **attributes: object) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(24, 48), nn.Linear(48, 24)])
        vars(self).update(attributes)


class Model(nn.Module):
    def __init__(self, attn: nn.Module, config: object = None) -> None:
        super().__init__()
        self.attn = attn
        self.config = config


def divided(model: nn.Module, plan: dict[str, object], degree: int = 2) -> dict[str, dict[str, int]]:
    """Return module path -> attributes that become local, without the sizes of the Linears."""
    resolved = resolve(model, plan, degree).modules
    return {
        module.path: module.values(0, degree)
        for module in resolved
        if isinstance(module.style, DivideAttributes)
    }


# ---------------------------------------------------------------- found and divided


@pytest.mark.parametrize("name", HEAD_COUNTS)
def test_P7_head_count_of_a_sharded_attention_is_divided(name: str) -> None:
    assert divided(Model(Attention(**{name: 8})), QKV) == {"attn": {name: 4}}


@pytest.mark.parametrize("name", WIDTHS)
def test_P7_width_is_divided_beside_a_head_count(name: str) -> None:
    assert divided(Model(Attention(heads=8, **{name: 24})), QKV) == {"attn": {"heads": 4, name: 12}}


@pytest.mark.parametrize("name", WIDTHS)
def test_width_without_a_head_count_is_left_alone(name: str) -> None:
    assert divided(Model(Attention(head_dim=3, **{name: 24})), QKV) == {}


@pytest.mark.parametrize("value", [None, 0, True, 8.0, "8"])
def test_attribute_that_holds_no_count_is_left_alone(value: object) -> None:
    assert divided(Model(Attention(heads=8, kv_heads=value)), QKV) == {"attn": {"heads": 4}}


def test_head_count_of_an_attention_that_stays_whole_is_left_alone() -> None:
    model = nn.ModuleDict({"attn": Attention(heads=8), "other": Attention(heads=8)})
    assert divided(model, QKV) == {"attn": {"heads": 4}}
    assert divided(model, {"attn.to_out.0": "rowwise"}) == {}


def test_head_count_is_found_through_containers_but_not_beyond_the_owner() -> None:
    fused = nn.Module()
    fused.qkv = nn.ModuleList([nn.Sequential(nn.Linear(24, 72))])
    model = Model(fused)
    model.heads = 8
    plan = {"attn.qkv.0.0": PackedColwiseParallel([1, 1, 1])}
    assert refusal(model, plan).findings[0].kind == "HeadsNotFound"
    fused.heads = 4
    assert divided(model, plan) == {"attn": {"heads": 2}}


def test_head_count_of_the_model_itself_is_divided() -> None:
    plan = {key.removeprefix("attn."): style for key, style in QKV.items()}
    assert divided(Attention(heads=8), plan) == {"": {"heads": 4}}


def test_every_sharded_attention_of_a_list_is_divided() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(Model(Attention(heads=8)) for _ in range(3))
    plan = {f"blocks.*.{key}": style for key, style in QKV.items()}
    assert divided(model, plan, degree=4) == {f"blocks.{i}.attn": {"heads": 2} for i in range(3)}


def test_entry_of_the_plan_replaces_what_would_be_found() -> None:
    model = Model(Attention(heads=8, groups=6))
    assert divided(model, {**QKV, "attn": DivideAttributes("groups")}) == {"attn": {"groups": 3}}
    assert divided(model, {**QKV, "attn": DivideAttributes()}) == {"attn": {}}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("degree", [2, 4])
def test_P7_P11_every_attention_of_a_shipped_plan_has_its_heads_divided(name: str, degree: int) -> None:
    module, model = family(name), tiny_skeleton(name)
    shared = {m.path for m in resolve(model, module.PLAN, degree).modules if m.style.leaves_shard}
    local = divided(model, module.PLAN, degree)
    for path, attention in model.named_modules():
        if "attention" in type(attention).__name__.lower() and f"{path}.to_q" in shared:
            own = vars(attention)
            counts = {name: own[name] for name in ("heads", "num_heads") if name in own}
            assert counts or own.keys() & {*HEAD_COUNTS, *HEAD_WIDTHS}
            assert {name: local[path][name] * degree for name in counts} == counts


# ---------------------------------------------------------------- not found, refused


def refusal(model: nn.Module, plan: dict[str, object], degree: int = 2) -> PlanError:
    with pytest.raises(PlanError) as caught:
        resolve(model, plan, degree)
    return caught.value


@pytest.mark.parametrize("attributes", [{}, {"h": 8}, {"heads": None}, {"inner_dim": 24}])
def test_sharded_attention_without_a_known_head_attribute_is_refused(attributes: dict[str, object]) -> None:
    (finding,) = refusal(Model(Attention(**attributes)), QKV).findings
    assert (finding.kind, finding.module, finding.plan_key) == ("HeadsNotFound", "attn", "attn.to_q")
    assert '"attn": DivideAttributes("...")' in finding.fix


@pytest.mark.parametrize("name", ["SelfAttention", "AttentionBlock", "CROSSATTENTION"])
def test_attention_is_known_by_the_name_of_its_class(name: str) -> None:
    cls = type(name, (FeedForward,), {})
    plan = {"attn.net.0": "colwise", "attn.net.1": "rowwise"}
    (finding,) = refusal(Model(cls()), plan).findings
    assert finding.kind == "HeadsNotFound"
    assert name in finding.message


@pytest.mark.parametrize(
    "names",
    [
        ("q", "k", "v"),
        ("wq", "wk", "wv"),
        ("query_proj", "key_proj", "value_proj"),
        ("qkv",),
        ("to_q", "to_kv"),
    ],
)
def test_attention_is_known_by_the_names_of_its_projections(names: tuple[str, ...]) -> None:
    mixer = nn.Module()
    for name in names:
        mixer.add_module(name, nn.Linear(24, 24))
    plan = {f"attn.{name}": "colwise" for name in names}
    assert refusal(Model(mixer), plan).findings[0].kind == "HeadsNotFound"
    mixer.heads = 4
    assert divided(Model(mixer), plan) == {"attn": {"heads": 2}}


@pytest.mark.parametrize("names", [("gate", "up"), ("k_up", "gate"), ("quality", "keys"), ("freq", "block")])
def test_other_names_of_linears_make_no_attention(names: tuple[str, ...]) -> None:
    mixer = nn.Module()
    for name in names:
        mixer.add_module(name, nn.Linear(24, 24))
    assert divided(Model(mixer), {f"attn.{name}": "colwise" for name in names}) == {}


@pytest.mark.parametrize("name", HEAD_WIDTHS)
def test_attention_that_splits_by_head_width_needs_no_head_count(name: str) -> None:
    assert divided(Model(Attention(**{name: 3})), QKV) == {}


@pytest.mark.parametrize("name", ["layer_idx", "layer_id", "num_key_value_groups"])
def test_number_of_a_block_or_of_queries_per_key_is_not_taken_for_heads(name: str) -> None:
    assert divided(Model(Attention(head_dim=3, **{name: 8})), QKV) == {}


def test_fix_of_heads_not_found_names_every_block_at_once() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(Model(Attention()) for _ in range(3))
    (finding,) = refusal(model, {f"blocks.*.{key}": style for key, style in QKV.items()}).findings
    assert (finding.module, finding.count) == ("blocks.0.attn", 3)
    assert '"blocks.*.attn": DivideAttributes' in finding.fix


@pytest.mark.parametrize("entry", [DivideAttributes("h"), DivideAttributes()])
def test_following_the_fix_of_heads_not_found_is_accepted(entry: DivideAttributes) -> None:
    assert isinstance(resolve(Model(Attention(h=8)), {**QKV, "attn": entry}, 2), ResolvedPlan)


def test_module_that_is_no_attention_needs_no_heads() -> None:
    assert divided(Model(FeedForward()), {"attn.net.0": "colwise", "attn.net.1": "rowwise"}) == {}


def test_attention_that_leaves_no_shard_needs_no_heads() -> None:
    assert divided(Model(Attention()), {"attn.to_q": "rowwise_split_input"}) == {}


# ---------------------------------------------------------------- divisibility


@pytest.mark.parametrize(("attribute", "degrees"), [("heads", "1, 2, 3, 6"), ("kv_heads", "1, 2")])
def test_E4_heads_of_a_module_that_the_degree_does_not_divide_are_refused(
    attribute: str, degrees: str
) -> None:
    error = refusal(Model(Attention(**{"heads": 8, attribute: 6})), QKV, degree=4)
    (finding,) = error.findings
    assert (finding.kind, finding.module) == ("IndivisibleHeads", "attn")
    assert finding.message == f"{attribute} is 6; 6 is not divisible by tp_degree 4"
    assert str(error).endswith(f"degrees that fit the whole plan: {degrees}")


@pytest.mark.parametrize("as_config", [dict, lambda names: SimpleNamespace(**names)], ids=["dict", "object"])
@pytest.mark.parametrize("name", CONFIG_HEADS)
def test_L2_E4_heads_of_the_config_that_the_degree_does_not_divide_are_refused(name, as_config) -> None:
    model = Model(Attention(head_dim=2), as_config({"num_attention_heads": 12, name: 6}))
    error = refusal(model, QKV, degree=4)
    (finding,) = error.findings
    assert (finding.kind, finding.module) == ("IndivisibleHeads", f"config.{name}")
    assert finding.fix.endswith(": 1, 2, 3, 6, or TensorParallelConfig(uneven=True)")
    assert error.degrees == (1, 2, 3, 6)  # 8 divides the Linears, and no head count
    assert divided(model, QKV, degree=3) == {}


def test_rows_of_a_packed_projection_are_not_all_counted_as_heads() -> None:
    attn = nn.Module()
    attn.head_dim, attn.to_qkv_mlp = 4, nn.Linear(24, 44)
    plan = {"attn.to_qkv_mlp": PackedColwiseParallel([4, 4, 4, 5, 5])}  # 2 heads of q, k and v; gate and up
    assert divided(Model(attn), plan) == {}


def test_head_width_that_does_not_divide_a_projection_counts_no_heads() -> None:
    assert divided(Model(Attention(head_dim=5)), QKV, degree=3) == {}


@pytest.mark.parametrize("config", [None, {}, {"num_attention_heads": None}, {"num_attention_heads": (3, 5)}])
def test_config_without_a_head_count_is_no_obstacle(config: object) -> None:
    assert not list(heads.indivisible([], config, 2))


def test_E4_config_and_modules_are_reported_together() -> None:
    model = Model(Attention(heads=6, kv_heads=3), {"num_attention_heads": 6})
    error = refusal(model, QKV, degree=4)
    assert sorted(finding.module for finding in error.findings) == [
        "attn",
        "attn",
        "config.num_attention_heads",
    ]


def few_key_heads(**attributes: object) -> Attention:
    """Eight query heads of three, and two key and value heads."""
    attn = Attention(**{"heads": 8, "kv_heads": 2, "inner_kv_dim": 6, "num_key_value_groups": 4} | attributes)
    attn.to_k, attn.to_v = nn.Linear(24, 6), nn.Linear(24, 6)
    return attn


def test_E4_fewer_key_heads_than_ranks_are_held_in_copies() -> None:
    resolved = resolve(Model(few_key_heads(), {"num_attention_heads": 8, "num_kv_heads": 2}), QKV, 8)
    assert resolved.layouts["attn.to_q.weight"] == Shard(0, (24,))
    assert resolved.layouts["attn.to_k.weight"] == resolved.layouts["attn.to_v.bias"] == Shard(0, (6,), 4)
    (attention,) = (m for m in resolved.modules if m.path == "attn")
    assert attention.values(3, 8) == {"heads": 1, "kv_heads": 1, "inner_kv_dim": 3, "num_key_value_groups": 1}


@pytest.mark.parametrize("degree", [2, 4])
def test_copies_need_no_entry_where_the_head_width_is_an_attribute(degree: int) -> None:
    attn = few_key_heads(head_dim=3)
    resolved = resolve(Model(attn), {**QKV, "attn": DivideAttributes("heads", "kv_heads")}, degree)
    assert resolved.layouts["attn.to_k.weight"].copies == degree // 2
    (attention,) = (m for m in resolved.modules if m.path == "attn")
    assert attention.values(0, degree) == {"heads": 8 // degree, "kv_heads": 1}


def test_groups_are_divided_also_where_no_attribute_counts_heads() -> None:
    attn = Attention(head_dim=3, num_key_value_groups=4)
    attn.to_k, attn.to_v = nn.Linear(24, 6), nn.Linear(24, 6)
    model = Model(attn)
    assert divided(model, QKV, 4) == {"attn": {"num_key_value_groups": 2}}
    assert divided(model, QKV, 2) == {}


def test_groups_are_divided_only_where_key_heads_are_held_in_copies() -> None:
    assert "num_key_value_groups" not in divided(Model(few_key_heads()), QKV, degree=2)["attn"]


@pytest.mark.parametrize("key_heads", [3, 6])
def test_E4_key_heads_that_are_no_divisor_of_the_degree_are_refused(key_heads: int) -> None:
    attn = Attention(heads=24, kv_heads=key_heads)
    attn.to_k, attn.to_v = nn.Linear(24, key_heads), nn.Linear(24, key_heads)
    error = refusal(Model(attn, {"num_kv_heads": key_heads}), QKV, degree=4)
    assert {f.kind for f in error.findings} <= {"IndivisibleHeads", "IndivisibleBlock"}
    assert 4 not in error.degrees
    assert {key_heads, 2 * key_heads} <= set(error.degrees)


def test_E4_key_heads_fused_with_queries_are_not_held_in_copies() -> None:
    attn = nn.Module()
    attn.head_dim, attn.to_qkv = 3, nn.Linear(24, 36)
    plan = {"attn.to_qkv": PackedColwiseParallel([4, 1, 1])}  # eight heads of queries, two of keys and values
    assert divided(Model(attn), plan) == {}
    assert {f.kind for f in refusal(Model(attn), plan, degree=4).findings} == {
        "IndivisibleHeads",
        "IndivisibleBlock",
    }


def test_norm_over_shared_key_heads_is_cut_as_they_are_and_that_over_queries_is_not() -> None:
    attn = few_key_heads()
    attn.norm_q, attn.norm_k = nn.RMSNorm(24), nn.RMSNorm(6)
    plan = QKV | {"attn.norm_q": "across_head_norm", "attn.norm_k": "across_head_norm"}
    layouts = resolve(Model(attn), plan, 4).layouts
    assert layouts["attn.norm_q.weight"] == Shard(0, (24,))
    assert layouts["attn.norm_k.weight"] == Shard(0, (6,), 2)


def test_E4_faults_come_in_the_order_of_the_model_so_that_every_rank_says_the_same() -> None:
    attn = Attention(head_dim=8)
    for name in ("add_q_proj", "add_k_proj", "add_v_proj"):
        attn.add_module(name, nn.Linear(24, 24))
    names = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"]
    error = refusal(Model(attn), {f"attn.{name}": "colwise" for name in names})
    assert [finding.module for finding in error.findings] == [f"attn.{name}" for name in names]


def test_heads_are_found_on_a_model_without_weights_and_change_nothing() -> None:
    with torch.device("meta"):
        model = Model(Attention(heads=8))
    divided(model, QKV)
    assert model.attn.heads == 8
    assert model.attn.to_q.out_features == 24
