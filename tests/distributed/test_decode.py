"""A spread VAE decode is that of one process with tiling, to the last bit, and each rank decodes a share of it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from shardwise import TensorParallelConfig, demo_model_path, enable_parallelism, spread_decode
from shardwise.demo.run import CALL
from shardwise.errors import (
    GroupError,
    RankFailure,
    ShardwiseError,
    UnequalInputs,
    UnsupportedOperation,
    UnsupportedState,
)
from shardwise.models import decode
from tests import vaes
from tests.helpers import randomize
from tests.pool import Pool
from tests.vaes import CASES, decoded, latents

BF16 = torch.bfloat16
KL, WAN = "AutoencoderKL", "AutoencoderKLWan"


def world(degree: int = 0) -> TensorParallelConfig:
    return TensorParallelConfig(tp_degree=degree or dist.get_world_size())


def spread(case: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return spread_decode(CASES[case][0]().to(dtype), config=world(), **options)


def count_calls(vae: Any) -> list[int]:
    """Return a list to which every call of a VAE's decoder adds the number of its latents."""
    calls: list[int] = []
    vae.decoder.register_forward_pre_hook(lambda decoder, args: calls.append(args[0].numel()))
    return calls


def decode_on_rank(case: str, z: Tensor, slicing: bool = False) -> tuple[Tensor, list[int], Any]:
    vae = spread(case, z.dtype)
    vae.use_slicing = slicing
    calls = count_calls(vae)
    return decoded(vae, z), calls, getattr(vae, "decode_report", None)


def alone(case: str, z: Tensor, slicing: bool = False) -> tuple[Tensor, list[int]]:
    vae = CASES[case][0]().to(z.dtype)
    vae.use_slicing = slicing
    calls = count_calls(vae)
    return decoded(vae, z), calls


# ---------------------------------------------------------------- bit-equal, and shared out


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + [(case, BF16) for case in (KL, "AutoencoderKLQwenImage", WAN)],
)
def test_spread_decode_is_that_of_one_process_and_each_rank_decodes_its_share(
    case: str, dtype: torch.dtype, ranks: Pool
) -> None:
    z = latents(case, dtype)
    expected, all_calls = alone(case, z)
    assert expected.dtype == dtype
    assert 0.01 < expected.float().std() < 0.5
    results = ranks.run(decode_on_rank, case, z)
    assert all(torch.equal(picture, expected) for picture, _, _ in results)
    # Every call of the decoder is made once, by one rank, and no rank has more than its share and a tile.
    assert sorted(size for _, calls, _ in results for size in calls) == sorted(all_calls)
    frames = len(all_calls) // CASES[case][2]
    for rank, (_, calls, report) in enumerate(results):
        assert sum(report.tiles) == CASES[case][2]
        assert len(calls) == frames * report.tiles[rank]
        assert sum(calls) <= sum(all_calls) / ranks.size + frames * max(all_calls)
        if case == KL:  # of 12 tiles
            assert sum(calls) <= {2: 0.52, 4: 0.28}[ranks.size] * sum(all_calls)


@pytest.mark.parametrize("shape", [(1, 4, 6, 9), (1, 4, 6, 13)], ids=["2 tiles", "3 tiles"])
def test_ranks_without_a_tile_have_the_whole_picture(shape: tuple[int, ...], four_ranks: Pool) -> None:
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    results = four_ranks.run(decode_on_rank, KL, z)
    assert all(torch.equal(picture, alone(KL, z)[0]) for picture, _, _ in results)
    tiles = 2 if shape[3] == 9 else 3
    assert sorted(len(calls) for _, calls, _ in results) == sorted([1] * tiles + [0] * (4 - tiles))


def test_latents_that_need_no_tiles_are_decoded_by_every_rank(two_ranks: Pool) -> None:
    z = torch.randn((1, 4, 8, 7), generator=torch.Generator().manual_seed(0))
    for picture, calls, report in two_ranks.run(decode_on_rank, KL, z):
        assert torch.equal(picture, alone(KL, z)[0])
        assert (len(calls), report) == (1, None)


@pytest.mark.parametrize("case", ["AutoencoderKL-batch", "AutoencoderKLQwenImage"])
def test_batch_that_is_decoded_in_slices_is_spread_slice_by_slice(case: str, two_ranks: Pool) -> None:
    z = latents(case)
    expected, all_calls = alone(case, z, slicing=True)
    results = two_ranks.run(decode_on_rank, case, z, slicing=True)
    assert all(torch.equal(picture, expected) for picture, _, _ in results)
    assert sum(len(calls) for _, calls, _ in results) == len(all_calls) == len(z) * CASES[case][2]


def _one_tile() -> tuple[Tensor, Tensor]:
    """Call `tiled_decode` itself, on latents of one tile: it goes on behind it to what patches need."""
    vae, z = vaes.wan22(), torch.randn(1, 4, 1, 1, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vae.tiled_decode(z, return_dict=False)[0]
        return spread_decode(vae, config=world()).tiled_decode(z, return_dict=False)[0], expected


def test_one_tile_is_decoded_by_every_rank(two_ranks: Pool) -> None:
    for picture, expected in two_ranks.run(_one_tile):
        assert torch.equal(picture, expected)


def _copied(case: str) -> tuple[bool, bool, bool]:
    vae, z = spread(case), latents(case)
    twin = copy.deepcopy(vae)
    randomize(twin, seed=7)
    other = CASES[case][0]()
    randomize(other, seed=7)
    own = decoded(CASES[case][0](), z)
    equal = torch.equal(decoded(twin, z), decoded(other, z)), torch.equal(decoded(vae, z), own)
    return *equal, twin.decode_report.tiles == vae.decode_report.tiles


def test_copy_decodes_with_its_own_weights_over_the_same_ranks(two_ranks: Pool) -> None:
    assert two_ranks.run(_copied, KL) == [(True, True, True)] * 2


def _taken_off() -> tuple[bool, int, int]:
    vae, z = spread(KL), latents(KL)
    expected = decoded(vae, z)
    vae = spread_decode(vae, config=world(1))
    calls = count_calls(vae)
    left = [name for name in vars(vae) if "spread" in name or name in ("tiled_decode", "decode_report")]
    return torch.equal(decoded(vae, z), expected), len(calls), len(left)


def test_degree_1_takes_spreading_off(two_ranks: Pool) -> None:
    assert two_ranks.run(_taken_off) == [(True, CASES[KL][2], 0)] * 2


def _compiled(what: str) -> Tensor:
    vae, z = spread(KL), latents(KL)
    if what == "decoder":
        vae.decoder = torch.compile(vae.decoder, backend="eager")
    elif what == "decode":
        vae.decode = torch.compile(vae.decode, backend="eager")
    else:
        accelerate.cpu_offload(vae, execution_device="cpu")
        assert vae.decoder.conv_out.weight.is_meta
    return decoded(vae, z)


@pytest.mark.parametrize("what", ["decoder", "decode", "offloaded"])
def test_spread_autoencoder_may_be_compiled_or_offloaded(what: str, two_ranks: Pool) -> None:
    expected = alone(KL, latents(KL))[0]
    assert all(torch.equal(picture, expected) for picture in two_ranks.run(_compiled, what))


def draw(degree: int) -> Tensor:
    """Return a picture of the demo's pipeline, its transformer whole, its tiles of 32 pixels."""
    pipeline = DiffusionPipeline.from_pretrained(demo_model_path())
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.enable_tiling()
    pipeline.vae.tile_sample_min_size, pipeline.vae.tile_latent_min_size = 32, 8
    spread_decode(pipeline.vae, config=world(degree))
    call = {**CALL, "output_type": "pt", "num_inference_steps": 2}
    images = pipeline(prompt="a red circle", generator=torch.Generator().manual_seed(1), **call).images
    assert degree == 1 or sum(pipeline.vae.decode_report.tiles) == 9
    return images


def test_pipeline_draws_the_picture_of_one_process_with_tiling(two_ranks: Pool) -> None:
    expected = draw(1)
    assert all(torch.equal(picture, expected) for picture in two_ranks.run(draw, 2))


# ---------------------------------------------------------------- negative controls


def _swapped(outputs: list[Tensor]) -> None:
    """Swap two tiles of one shape."""
    i, j = next((i, j) for j in range(len(outputs)) for i in range(j) if outputs[i].shape == outputs[j].shape)
    outputs[i], outputs[j] = outputs[j], outputs[i]


def _missing(outputs: list[Tensor]) -> None:
    outputs[-1] = torch.zeros_like(outputs[-1])


def _last_bit(outputs: list[Tensor]) -> None:
    first = outputs[0].view(-1)
    first[:1] = torch.nextafter(first[:1], first.new_tensor([9.0]))


def _broken(case: str, change: Callable[[list[Tensor]], None]) -> Tensor:
    played = decode.played

    def changed(vae: Any, decode: Any, outputs: Sequence[Tensor]) -> Any:
        outputs = list(outputs)
        change(outputs)
        return played(vae, decode, outputs)

    with mock.patch.object(decode, "played", changed):
        return decoded(spread(case), latents(case))


@pytest.mark.parametrize("change", [_swapped, _missing, _last_bit])
@pytest.mark.parametrize("case", [KL, WAN])
def test_tiles_in_another_order_or_missing_or_off_by_a_bit_are_seen(
    case: str, change: Callable[[list[Tensor]], None], two_ranks: Pool
) -> None:
    expected = alone(case, latents(case))[0]
    assert not any(torch.equal(picture, expected) for picture in two_ranks.run(_broken, case, change))


def _frames_apart() -> Tensor:
    """Share out frames as if they were tiles of their own."""

    class Notes(decode._Notes):
        def forward(self, latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = super().forward(latents, *args, **kwargs)
            if len(self.tiles[-1].calls) > 1:
                self.tiles.append(decode.Tile(self.tiles[-1].cache, [self.tiles[-1].calls.pop()]))
            return result

    vae = spread(WAN)
    with mock.patch.object(decode, "_Notes", Notes), mock.patch.object(decode, "share_out", _in_turn):
        return decoded(vae, latents(WAN))


def _in_turn(sizes: Sequence[int], degree: int) -> list[int]:
    return [i % degree for i in range(len(sizes))]


def test_frames_that_share_a_cache_must_stay_on_one_rank(two_ranks: Pool) -> None:
    expected = alone(WAN, latents(WAN))[0]
    assert not any(torch.equal(picture, expected) for picture in two_ranks.run(_frames_apart))


def _ownerless() -> Tensor:
    """Exchange nothing: each rank blends what it has itself."""
    vae = spread(KL)
    with mock.patch.object(
        decode.TensorParallelGroup, "all_gather", lambda group, rows, own: rows.copy_(own)
    ):
        return decoded(vae, latents(KL))


def test_without_the_exchange_the_picture_is_wrong(two_ranks: Pool) -> None:
    expected = alone(KL, latents(KL))[0]
    assert not any(torch.equal(picture, expected) for picture in two_ranks.run(_ownerless))


# ---------------------------------------------------------------- errors reach all ranks


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    try:
        function()
    except (ShardwiseError, MemoryError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


def _failing(where: str) -> tuple[tuple[str, str], bool]:
    vae, z = spread(KL), latents(KL)
    expected = decoded(vae, z)

    def fail(*args: Any) -> None:
        raise MemoryError("no memory for tiles")

    handles = []
    if dist.get_rank() == 1:
        handles.append(vae.get_submodule(where).register_forward_pre_hook(fail))
    error = error_of(lambda: decoded(vae, z))
    for handle in handles:
        handle.remove()
    return error, torch.equal(decoded(vae, z), expected)


@pytest.mark.parametrize("where", ["decoder", "decoder.mid_block", "post_quant_conv"])
def test_error_of_one_rank_is_raised_on_all_and_the_next_decode_is_right(where: str, two_ranks: Pool) -> None:
    (first, again), (second, again_too) = two_ranks.run(_failing, where)
    assert first == (
        "RankFailure",
        "decoding by AutoencoderKL failed on rank 1 of 2: MemoryError: no memory for tiles",
    )
    assert second == ("MemoryError", "no memory for tiles")
    assert again
    assert again_too


def _other_latents(vae: Any, z: Tensor) -> Tensor:
    return decoded(vae, z + 1e-6)


def _other_shape(vae: Any, z: Tensor) -> Tensor:
    return decoded(vae, z[:, :, :-1])


def _other_tiles(vae: Any, z: Tensor) -> Tensor:
    vae.tile_latent_min_size, vae.tile_sample_min_size = 6, 12
    return decoded(vae, z)


def _other_dtype(vae: Any, z: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return decoded(vae, z)


def _differing(change: Callable[[Any, Tensor], Tensor]) -> tuple[str, str]:
    vae, z = spread(KL), latents(KL)
    return error_of(lambda: (change if dist.get_rank() == 1 else decoded)(vae, z))


@pytest.mark.parametrize(
    ("change", "named", "hint"),
    [
        (_other_latents, "latents", "equally seeded generator"),
        (_other_shape, "latents", "equally seeded generator"),
        (_other_tiles, "tiles", "call enable_tiling with the same sizes"),
        (_other_dtype, "dtype", "decode in the same dtype"),
    ],
)
def test_ranks_that_decode_different_things_are_told_so(
    change: Callable[[Any, Tensor], Tensor], named: str, hint: str, two_ranks: Pool
) -> None:
    first, second = two_ranks.run(_differing, change)
    assert first == second
    kind, text = first
    assert kind == UnequalInputs.__name__
    assert f"the ranks differ in {named}: " in text
    assert hint in text
    assert "  rank 1: " in text


def _inconsistent() -> tuple[str, str]:
    vae, z = spread(KL), latents(KL)
    vae.tile_sample_min_size = 24
    return error_of(lambda: decoded(vae, z))


def test_sizes_of_tiles_that_make_a_picture_of_another_size_are_refused(two_ranks: Pool) -> None:
    vae, z = vaes.kl(), latents(KL)
    size = decoded(vae, z).shape
    vae.tile_sample_min_size = 24
    assert decoded(vae, z).shape != size  # as diffusers does it
    for kind, text in two_ranks.run(_inconsistent):
        assert kind == UnsupportedState.__name__
        assert "set one to 16 pixels, or the other to 12 latents" in text


def _late() -> tuple[str, str]:
    vae, z = spread(KL, timeout=1.0), latents(KL)
    if dist.get_rank() == 1:
        time.sleep(2.5)
    return error_of(lambda: decoded(vae, z))


def test_rank_that_does_not_decode_is_not_waited_for_for_ever(two_ranks: Pool) -> None:
    (kind, text), (late_kind, late_text) = two_ranks.run(_late)
    assert kind == late_kind == RankFailure.__name__
    assert "rank 1 of 2 (global rank 1) did not answer within 0:00:01" in text
    assert "has given up" in late_text


# ---------------------------------------------------------------- refusals


def _with_gradients(asked: str) -> tuple[str, str]:
    vae, z = spread(KL), latents(KL)
    if asked == "latents":
        z.requires_grad_()
    else:
        vae.train()
    return error_of(lambda: vae.decode(z))


@pytest.mark.parametrize("asked", ["latents", "weights"])
def test_gradients_are_refused(asked: str, two_ranks: Pool) -> None:
    for kind, text in two_ranks.run(_with_gradients, asked):
        assert kind == UnsupportedOperation.__name__
        assert "spread_decode(vae, config=TensorParallelConfig(tp_degree=1))" in text


def _noisy() -> nn.Module:
    return vaes.ltx(decoder_inject_noise=(False, False, True, False, False))


class Lonely(nn.Module):
    """No autoencoder of diffusers."""


def _untiled() -> nn.Module:
    vae = vaes.kl()
    vae.disable_tiling()
    return vae


def _sharded() -> nn.Module:
    plan = {"decoder.mid_block.resnets.*.conv1": "rowwise_split_input"}
    config = TensorParallelConfig(dist.get_world_size(), check=False)
    return enable_parallelism(vaes.kl(), config=config, plan=plan)


def _other_weights() -> nn.Module:
    vae = vaes.kl()
    if dist.get_rank() == 1:
        vae.decoder.conv_out.bias.data[0] += 1e-3
    return vae


def _refused(make: Callable[[], nn.Module], degree: int = 0) -> tuple[str, str]:
    vae = make()
    before = set(vars(vae))
    kind, text = error_of(lambda: spread_decode(vae, config=world(degree)))
    assert set(vars(vae)) == before
    return kind, text


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            Lonely,
            UnsupportedState,
            ", ".join(decode.SPREADABLE),
        ),
        (_untiled, UnsupportedState, "call vae.enable_tiling() first"),
        (_noisy, UnsupportedState, "draws noise"),
        (_sharded, UnsupportedState, "AutoencoderKL is sharded"),
        (_other_weights, RankFailure, "the ranks differ in weights"),
    ],
)
def test_what_cannot_be_spread_is_refused_on_every_rank(
    make: Callable[[], nn.Module], error: type[ShardwiseError], words: str, two_ranks: Pool
) -> None:
    for kind, text in two_ranks.run(_refused, make):
        assert kind == error.__name__
        assert words in text


def test_degree_must_be_the_number_of_ranks(two_ranks: Pool) -> None:
    assert {kind for kind, _ in two_ranks.run(_refused, vaes.kl, degree=4)} == {GroupError.__name__}
