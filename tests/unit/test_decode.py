"""The parts of a spread decode that need no ranks: what is noted, and who decodes what."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from shardwise import TensorParallelConfig, spread_decode
from shardwise.errors import ConfigError, GroupError
from shardwise.models.decode import SPREADABLE, noted, played, share_out
from shardwise.plan.meta import meta_parameters
from tests import vaes
from tests.vaes import CASES, latents, tiled

PAGE = Path(__file__).parents[2] / "docs" / "decode.md"


@pytest.mark.parametrize(
    ("sizes", "degree", "owners"),
    [
        ([4, 4, 4, 4], 2, [0, 1, 0, 1]),
        ([1, 1, 8], 2, [1, 1, 0]),
        ([9, 6, 6, 4], 2, [0, 1, 1, 0]),
        ([5, 3], 4, [0, 1]),
        ([], 2, []),
    ],
)
def test_largest_tiles_go_first_each_to_the_rank_with_least_to_do(
    sizes: list[int], degree: int, owners: list[int]
) -> None:
    assert share_out(sizes, degree) == owners


@pytest.mark.parametrize("case", CASES)
def test_noting_tiles_decodes_nothing_and_leaves_the_autoencoder_as_it_was(case: str) -> None:
    make, _, tiles = CASES[case]
    vae, z = make(), latents(case)
    decoder, attributes = vae.decoder, set(vars(vae))
    decoder.register_forward_pre_hook(lambda *args: pytest.fail("the decoder was called"))
    notes = noted(vae, *tiled(vae, z))
    assert len(notes) == tiles
    assert vae.decoder is decoder
    assert not {name for name in vars(vae) if name.startswith("blend")}
    assert set(vars(vae)) - attributes <= {"_conv_num", "_conv_idx", "_feat_map", *_ENCODER_CACHE}


_ENCODER_CACHE = {"_enc_conv_num", "_enc_conv_idx", "_enc_feat_map"}


@pytest.mark.parametrize("case", CASES)
def test_what_was_noted_is_what_the_decoder_is_asked_for(case: str) -> None:
    vae, z = CASES[case][0](), latents(case)
    decode, ends = tiled(vae, z)
    with torch.no_grad():
        expected = decode()
        outputs = [
            vae.decoder(*args, **kwargs) for tile in noted(vae, decode, ends) for args, kwargs in tile.calls
        ]
        assert torch.equal(played(vae, decode, outputs), expected)


def test_frames_that_share_a_cache_are_one_tile() -> None:
    vae, z = vaes.wan(), latents("AutoencoderKLWan")
    assert {len(tile.calls) for tile in noted(vae, *tiled(vae, z))} == {3}


def test_outputs_that_are_left_over_are_noticed() -> None:
    vae, z = vaes.kl(), latents("AutoencoderKL")
    outputs = [torch.zeros(1, 3, 16, 16)] * 13
    with pytest.raises(AssertionError, match="fewer tiles"):
        played(vae, tiled(vae, z)[0], outputs)


@pytest.mark.parametrize("tiles", [0, 2])
def test_error_while_tiles_are_noted_is_raised_and_the_decoder_is_back(tiles: int) -> None:
    vae, z = vaes.kl(), latents("AutoencoderKL")
    decoder, calls = vae.decoder, []

    def fail(module: Any, args: Any) -> None:
        calls.append(module)
        if len(calls) > tiles:
            raise MemoryError

    vae.post_quant_conv.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        noted(vae, *tiled(vae, z))
    assert vae.decoder is decoder


@pytest.mark.parametrize("name", SPREADABLE)
def test_spreadable_class_blends_as_it_is_taken_to(name: str) -> None:
    cls = getattr(diffusers, name)
    source = inspect.getsource(cls.tiled_decode)
    assert source.rindex("self.decoder(") < source.index("self.blend_v(") < source.index("self.blend_h(")
    assert any(case.split("-")[0] == name for case in CASES)


_FLUX1 = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "latent_channels": 16,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


@pytest.mark.parametrize(
    ("name", "config", "tile", "shape"),
    [
        ("AutoencoderKL", _FLUX1, 512, (1, 16, 128, 128)),
        ("AutoencoderKLFlux2", {}, None, (1, 32, 256, 256)),
        ("AutoencoderKLQwenImage", {}, None, (1, 16, 1, 166, 166)),
        ("AutoencoderKLWan", {}, None, (1, 16, 21, 60, 104)),
    ],
)
def test_shares_of_released_sizes_are_those_of_the_page(
    name: str, config: dict[str, Any], tile: int | None, shape: tuple[int, ...]
) -> None:
    with meta_parameters():
        vae = getattr(diffusers, name)(**config)
    vae.enable_tiling()
    if tile is not None:
        vae.tile_sample_min_size, vae.tile_latent_min_size = tile, tile // 8
    z = torch.empty(shape, device="meta")
    sizes = [part.size for part in noted(vae, *tiled(vae, z))]
    shares = []
    for degree in (2, 4, 8):
        owners = share_out(sizes, degree)
        loads = [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(degree)]
        shares.append(f"{max(loads) / sum(sizes):.2f}")
    (row,) = (line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {name} "))
    assert row.endswith(f"| {len(sizes)} | {' | '.join(shares)} |")
    assert 1.55 < sum(sizes) / z.numel() < 1.7


def test_degree_1_needs_no_process_group_and_no_tiling() -> None:
    vae = vaes.kl()
    vae.disable_tiling()
    before = set(vars(vae))
    assert spread_decode(vae, config=TensorParallelConfig()) is vae
    assert set(vars(vae)) == before


def test_without_a_process_group_it_is_said() -> None:
    with pytest.raises(GroupError, match="torchrun"):
        spread_decode(vaes.kl(), config=TensorParallelConfig(tp_degree=2))


def test_config_must_be_one() -> None:
    with pytest.raises(ConfigError, match="got int"):
        spread_decode(vaes.kl(), config=2)
