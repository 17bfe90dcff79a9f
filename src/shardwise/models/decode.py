"""VAE decoding that is shared out over the ranks: each decodes some of the tiles, and all blend the same ones.

Tiling, blending and cropping are diffusers' own, run twice. The first run notes what the decoder is asked for, and ends
where blending begins. Then each rank decodes its share, and the ranks exchange what they have. The second run is given
this in place of the decoder's work. So the picture is that of one process with tiling, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import islice
from math import prod
from types import MethodType
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn

from shardwise.config import TensorParallelConfig
from shardwise.errors import UnequalInputs, UnsupportedOperation, UnsupportedState
from shardwise.models.parallelism import as_config
from shardwise.runtime.agreement import PATIENCE
from shardwise.runtime.debug import text_of
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.shard import digest, named_tensors, sharding_of

SPREADABLE = (
    "AutoencoderDC",
    "AutoencoderKL",
    "AutoencoderKLFlux2",
    "AutoencoderKLHunyuanImage",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLLTX2Video",
    "AutoencoderKLLTXVideo",
    "AutoencoderKLQwenImage",
    "AutoencoderKLWan",
)
"""Classes of diffusers whose tiled decode is proved to be bit-equal when it is spread."""

_M = TypeVar("_M", bound=nn.Module)
_STATE = "_shardwise_spread"
TILINGS = {"tiled_decode": ("blend_v", "blend_h"), "_temporal_tiled_decode": ("blend_t",)}
"""Methods of diffusers that decode in tiles -> what they call once all are decoded. The second may call the first."""


@dataclass(frozen=True)
class DecodeReport:
    """What the last spread decode did; a VAE has it as `decode_report`."""

    tiles: tuple[int, ...]
    """Tiles that each rank decoded, in rank order."""
    exchanged_bytes: int
    """Bytes that this rank received, its own tiles among them."""


@dataclass(frozen=True)
class Spread:
    """Over which ranks a VAE decodes, and how long they wait for each other."""

    group: TensorParallelGroup
    patience: timedelta


@dataclass
class Tile:
    """A part of the latents that one rank decodes: several calls of the decoder if they share a cache of features."""

    cache: object
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the latents of each call."""
        return [tuple(args[0].shape) for args, _ in self.calls]

    @property
    def size(self) -> int:
        """Number of latent values, which the time to decode them follows."""
        return sum(prod(shape) for shape in self.shapes)


def spread_decode(vae: _M, *, config: TensorParallelConfig, timeout: float = PATIENCE.total_seconds()) -> _M:
    """Share out the tiles of a VAE's decode over the ranks, in place, and return the VAE.

    Every rank holds the whole VAE, calls `vae.decode` with the same latents, and gets the whole picture. It is that of
    one process *with tiling*, to the last bit; tiling itself changes a picture a little, so it is switched on before
    this call and not by it. Latents that need no tiles are decoded by every rank as before. Gradients are refused.

    Args:
        vae: An autoencoder of diffusers, one of `SPREADABLE`, whose `enable_tiling()` was called.
        config: The degree, and the ranks. Of degree 1, the VAE decodes by itself (again).
        timeout: Seconds that a rank waits for the slowest one.

    Raises:
        ConfigError: `config` is not a tensor parallel configuration.
        UnsupportedState: the VAE is of another class, is sharded, or has tiling switched off; on every rank.
        GroupError: there is no process group of this size, or this process is not in it.
        RankFailure: another rank failed, or has other weights.
    """
    config = as_config(config)
    if config.tp_degree == 1:
        for name in (*TILINGS, "decode_report", _STATE):
            vars(vae).pop(name, None)
        return vae
    group = TensorParallelGroup.of(config)
    with group.agreement(f"spreading {type(vae).__name__}") as step:
        group.check(config)
        _check(vae)
        step.must_equal(vae=type(vae).__name__, weights=_weights(vae))
    vars(vae)[_STATE] = Spread(group, timedelta(seconds=timeout))
    for name in TILINGS:
        if hasattr(type(vae), name):
            vars(vae)[name] = MethodType(partial(tiled_decode, name), vae)
    return vae


@torch.compiler.disable  # type: ignore[untyped-decorator]
def tiled_decode(name: str, vae: Any, z: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Decode in tiles as diffusers' method of this name does, of which each rank decodes some.

    Raises:
        UnsupportedOperation: gradients are asked for; on every rank.
        UnequalInputs: the ranks have different latents, tiles or dtypes; on every rank.
        RankFailure: another rank failed, or did not make the call.
    """
    spread: Spread = vars(vae)[_STATE]
    decode = partial(getattr(type(vae), name), vae, z, *args, **kwargs)
    with spread.group.agreement(_subject(vae), spread.patience) as step:
        _refuse_gradients(vae, z)
        _check_sizes(vae)
        tiles = noted(vae, decode, TILINGS[name])
        given = [text_of(value) for value in (z, *args, *kwargs.values()) if isinstance(value, Tensor)]
        step.say([", ".join(given), f"{len(tiles)} tiles ({digest([tile.shapes for tile in tiles])})"])
    latents, tilings = zip(*step.heard, strict=True)
    _require_equal(vae, "latents", latents, "give every rank the same prompt and an equally seeded generator")
    _require_equal(vae, "tiles", tilings, "call enable_tiling with the same sizes on every rank")
    if len(tiles) < 2:
        return decode()
    outputs, vars(vae)["decode_report"] = _decode_together(vae, z, tiles, spread)
    return played(vae, decode, outputs)


@torch.no_grad()
def _decode_together(
    vae: Any, z: Tensor, tiles: Sequence[Tile], spread: Spread
) -> tuple[list[Tensor], DecodeReport]:
    """Return what the decoder returns in each of its calls, in their order, of which this rank computes its share."""
    group, subject = spread.group, _subject(vae)
    owners = share_out([tile.size for tile in tiles], group.degree)
    with group.agreement(subject, spread.patience) as step:
        own = [tile for tile, owner in zip(tiles, owners, strict=True) if owner == group.rank]
        mine = [vae.decoder(*args, **kwargs) for tile in own for args, kwargs in tile.calls]
        step.say([str(mine[0].dtype) if mine else None, [tuple(output.shape) for output in mine]])
    dtypes, shapes = zip(*step.heard, strict=True)
    dtype = next(filter(None, dtypes))
    given = [theirs or dtype for theirs in dtypes]  # a rank without tiles has any
    _require_equal(vae, "dtype", given, "decode in the same dtype on every rank")
    with group.agreement(subject, spread.patience):  # memory may run out, and nobody may wait then
        length = max(sum(map(prod, theirs)) for theirs in shapes)
        own_row = torch.zeros(length, dtype=getattr(torch, dtype.removeprefix("torch.")), device=group.device)
        rows = own_row.new_empty(group.degree, len(own_row))
        for place, output in zip(_unpacked(own_row, shapes[group.rank]), mine, strict=True):
            place.copy_(output)
    del mine
    group.all_gather(rows, own_row)
    parts = [_unpacked(row, theirs) for row, theirs in zip(rows.to(z.device), shapes, strict=True)]
    outputs = [
        output
        for tile, owner in zip(tiles, owners, strict=True)
        for output in islice(parts[owner], len(tile.calls))
    ]
    return outputs, DecodeReport(tuple(map(owners.count, range(group.degree))), rows.nbytes)


def share_out(sizes: Sequence[int], degree: int) -> list[int]:
    """Return which rank decodes each tile: the largest first, each to the rank that has least to do."""
    owners, loads = [0] * len(sizes), [0] * degree
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


@torch.no_grad()
def noted(vae: Any, decode: Callable[[], Any], ends: Sequence[str]) -> list[Tile]:
    """Return the tiles that a tiled decode asks the decoder for, without decoding any.

    Args:
        vae: The autoencoder.
        decode: Its tiled decode.
        ends: Methods of blending, of which the first to be called means that there are no more tiles.
    """
    notes = _Notes(vae.decoder)
    with ExitStack() as stack:
        stack.enter_context(_in_place(notes, vae))
        for name in ("blend_v", "blend_h", "blend_t"):
            if hasattr(vae, name):
                stack.enter_context(mock.patch.object(vae, name, _end if name in ends else _unblended))
        try:
            decode()
        except _AllNoted:
            pass
        except Exception:
            if len(notes.tiles) != 1:
                raise  # one tile is not blended, and what comes after it may not fit a placeholder
    return notes.tiles


@torch.no_grad()
def played(vae: Any, decode: Callable[[], Any], outputs: Sequence[Tensor]) -> Any:
    """Return what a tiled decode makes of what the decoder returns in each of its calls."""
    player = _Player(vae.decoder, outputs)
    with _in_place(player, vae):
        result = decode()
    assert next(player.outputs, None) is None, "the second run asked for fewer tiles than the first"
    return result


class _AllNoted(Exception):
    """Blending begins: there are no more tiles."""


def _end(*args: Any) -> None:
    raise _AllNoted


def _unblended(before: Tensor, tile: Tensor, extent: int) -> Tensor:
    return tile


class _StandIn(nn.Module):
    """Takes the place of a decoder, and has it inside: QwenImage counts its convolutions for each tile."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder


class _Notes(_StandIn):
    """Notes what a decoder is given."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__(decoder)
        self.tiles: list[Tile] = []

    def forward(self, latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cache = kwargs.get("feat_cache")
        if cache is None or not self.tiles or self.tiles[-1].cache is not cache:
            self.tiles.append(Tile(cache))
        self.tiles[-1].calls.append(((latents, *args), kwargs))
        return latents.new_empty((1,) * latents.ndim)


class _Player(_StandIn):
    """Returns what a decoder would, which is known."""

    def __init__(self, decoder: nn.Module, outputs: Sequence[Tensor]) -> None:
        super().__init__(decoder)
        self.outputs = iter(outputs)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return next(self.outputs)


@contextmanager
def _in_place(stand_in: _StandIn, vae: nn.Module) -> Iterator[None]:
    """Let a module be the decoder of diffusers' own code for a while; hooks of the real one see its real calls only."""
    spread = {name: vars(vae).pop(name) for name in TILINGS if name in vars(vae)}
    vae._modules["decoder"] = stand_in
    try:
        yield
    finally:
        vars(vae).update(spread)
        vae._modules["decoder"] = stand_in.decoder


def _unpacked(row: Tensor, shapes: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Yield the tensors of these shapes that lie in a row one after the other, as views of it."""
    start = 0
    for shape in shapes:
        yield row[start : start + prod(shape)].view(*shape)
        start += prod(shape)


def _subject(vae: nn.Module) -> str:
    return f"decoding by {type(vae).__name__}"


def _check(vae: nn.Module) -> None:
    name = type(vae).__name__
    if not {cls.__name__ for cls in type(vae).__mro__} & set(SPREADABLE):
        raise UnsupportedState(
            f"the decode of {name} cannot be spread, that of these can: {', '.join(SPREADABLE)}"
        )
    if any(sharding_of(module) for module in vae.modules()):
        raise UnsupportedState(
            f"{name} is sharded, so its ranks decode every tile together: spread a VAE that each rank holds whole"
        )
    if any(getattr(vae, "config", {}).get("decoder_inject_noise", ())):
        raise UnsupportedState(
            f"the decoder of this {name} draws noise, which follows from the tiles that were decoded before: "
            "ranks that decode some of them would draw another picture"
        )
    if not getattr(vae, "use_tiling", False):
        raise UnsupportedState(
            f"{name} decodes without tiles, and tiles are what is shared out: call vae.enable_tiling() first, "
            "which changes the picture a little, in one process as well"
        )


def _check_sizes(vae: Any) -> None:
    """Refuse tiles of two sizes that do not mean each other; diffusers makes a picture of another size of them."""
    if not hasattr(vae, "tile_latent_min_size"):
        return
    factor = vae.config.get("spatial_compression_ratio") or 2 ** (len(vae.config.block_out_channels) - 1)
    if vae.tile_sample_min_size // factor != vae.tile_latent_min_size:
        raise UnsupportedState(
            f"{type(vae).__name__} makes {factor} pixels of a latent, so tiles of tile_latent_min_size "
            f"{vae.tile_latent_min_size} are not of tile_sample_min_size {vae.tile_sample_min_size}: set one to "
            f"{factor * vae.tile_latent_min_size} pixels, or the other to {vae.tile_sample_min_size // factor} latents"
        )


def _weights(vae: nn.Module) -> str:
    """Return what tells the weights of two VAEs apart, short enough for a message; offloaded ones are not looked at."""
    facts = [(name, tuple(t.shape), str(t.dtype), _sum_of_bytes(t)) for name, t in named_tensors(vae)]
    return f"{len(facts)} tensors ({digest(facts)})"


def _sum_of_bytes(tensor: Tensor) -> int | None:
    if tensor.is_meta:
        return None
    return int(tensor.detach().contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64))


def _refuse_gradients(vae: nn.Module, z: Tensor) -> None:
    if torch.is_grad_enabled() and (z.requires_grad or vae.training):
        raise UnsupportedOperation(
            "a spread decode has no gradients: decode under torch.no_grad(), "
            "or take spreading off with spread_decode(vae, config=TensorParallelConfig(tp_degree=1))"
        )


def _require_equal(vae: nn.Module, what: str, values: Sequence[Any], hint: str) -> None:
    if len(set(values)) > 1:
        listing = "\n".join(f"  rank {rank}: {value}" for rank, value in enumerate(values))
        raise UnequalInputs(f"{_subject(vae)}: the ranks differ in {what}: {hint}\n{listing}")
