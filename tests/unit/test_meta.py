"""Building without weights: no parameter takes memory, buffers are real, ties hold, nothing stays patched."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardwise.plan.meta import meta_parameters

TERABYTES = 10**6
"""Features of a square Linear that fits no machine: 4 TB in fp32."""


class Assorted(nn.Module):
    """Parameters and buffers of every kind that a model registers."""

    def __init__(self) -> None:
        super().__init__()
        self.direct = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        self.register_parameter("absent", None)
        self.items = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.batch_norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 6)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class SharedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.zeros(5, 4))
        self.first = weight
        self.second = weight


class TiedAfterwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 4)
        self.second = nn.Linear(4, 5, bias=False)
        self.second.weight = self.first.weight


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first


def build(factory: Callable[[], nn.Module]) -> nn.Module:
    with meta_parameters():
        return factory()


@pytest.mark.parametrize("factory", [Assorted, SharedParameter, TiedAfterwards, SharedModule])
def test_model_without_weights_has_every_name_shape_and_dtype(factory: Callable[[], nn.Module]) -> None:
    def described(model: nn.Module) -> list[tuple[object, ...]]:
        named = model.named_parameters(remove_duplicate=False)
        return [(name, p.shape, p.dtype, p.requires_grad, type(p)) for name, p in named]

    model = build(factory)
    assert described(model) == described(factory())
    assert model.state_dict().keys() == factory().state_dict().keys()


@pytest.mark.parametrize("factory", [Assorted, SharedParameter, TiedAfterwards, SharedModule])
def test_no_parameter_has_data(factory: Callable[[], nn.Module]) -> None:
    assert all(parameter.is_meta for parameter in build(factory).parameters())
    assert not any(parameter.is_meta for parameter in factory().parameters())


def test_buffers_are_computed_as_always() -> None:
    buffers = dict(build(Assorted).named_buffers())
    expected = dict(Assorted().named_buffers())
    assert buffers.keys() == expected.keys() > {"table"}
    assert all(torch.equal(buffers[name], expected[name]) for name in expected)


@pytest.mark.parametrize("factory", [SharedParameter, TiedAfterwards, SharedModule])
def test_tied_weights_stay_one_tensor(factory: Callable[[], nn.Module]) -> None:
    model = build(factory)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(names) == 2 * len(list(model.parameters()))


def test_weights_that_are_not_tied_stay_apart() -> None:
    model = build(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(20)))
    assert len({id(parameter) for parameter in model.parameters()}) == 40


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((TERABYTES, TERABYTES), {}),
        ((TERABYTES, TERABYTES, False), {"dtype": torch.bfloat16}),
        ((TERABYTES,), {"out_features": TERABYTES, "device": None}),
        ((TERABYTES, TERABYTES, True, None, torch.float64), {}),
    ],
)
def test_linear_never_allocates_its_weight(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    linear = build(lambda: nn.Linear(*args, **kwargs))
    assert linear.weight.shape == (TERABYTES, TERABYTES)
    assert linear.weight.is_meta


@pytest.mark.parametrize("cls", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolution_never_allocates_its_weight(cls: type[nn.Conv1d | nn.Conv2d | nn.Conv3d]) -> None:
    convolution = build(lambda: cls(TERABYTES, TERABYTES, 1, 2, bias=False))
    assert (convolution.weight.is_meta, convolution.stride[0], convolution.bias) == (True, 2, None)


def test_embedding_never_allocates_its_weight() -> None:
    embedding = build(lambda: nn.Embedding(TERABYTES, TERABYTES, 3))
    assert (embedding.weight.is_meta, tuple(embedding.weight.shape)) == (True, (TERABYTES, TERABYTES))
    assert embedding.padding_idx == 3


def test_linear_takes_the_arguments_it_always_takes() -> None:
    linear = build(lambda: nn.Linear(3, 5, False, dtype=torch.bfloat16))
    assert (linear.in_features, linear.out_features, linear.bias) == (3, 5, None)
    assert linear.weight.dtype == torch.bfloat16


def test_subclass_of_linear_is_built_without_weights_too() -> None:
    class Doubled(nn.Linear):
        def __init__(self, features: int) -> None:
            super().__init__(features, 2 * features)

    assert build(lambda: Doubled(TERABYTES)).weight.is_meta


def test_device_that_a_model_asks_for_gives_no_weights_either() -> None:
    assert build(lambda: nn.Linear(3, 5, device="cpu")).weight.is_meta


def test_nothing_stays_patched_after_the_context() -> None:
    before = nn.Linear.__init__, nn.Module.register_parameter
    with meta_parameters():
        assert (nn.Linear.__init__, nn.Module.register_parameter) != before
    assert (nn.Linear.__init__, nn.Module.register_parameter) == before
    assert not nn.Linear(2, 2).weight.is_meta


def test_nothing_stays_patched_after_an_error() -> None:
    before = nn.Linear.__init__, nn.Module.register_parameter
    with pytest.raises(KeyError), meta_parameters():
        raise KeyError
    assert (nn.Linear.__init__, nn.Module.register_parameter) == before


def test_contexts_nest() -> None:
    with meta_parameters():
        with meta_parameters():
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert inner.weight.is_meta
    assert outer.weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta
