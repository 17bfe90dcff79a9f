"""The optional branches of the shipped families: inputs that may be given or left out, and what they need of a model.

A branch is what it changes: in the family's tiny configuration, in the model, and in its example inputs. Other
configurations of a class stand beside its plan, as `TINY_VARIANTS`. Not here are arguments that change no number
(`return_dict`, and `attention_kwargs` where they hold nothing but the scale of a LoRA), and two that no
configuration of diffusers 0.42.1 can take: `guidance` of Qwen-Image and `timestep_cond` of CogVideoX. Nor are the
ControlNet residuals of Hunyuan-DiT, whose forward takes them out of the list that it is given.
MiniMax-H3 has no optional argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from shardwise.models.lookup import example_inputs
from tests.adapters import load_flux_adapters, load_sd3_adapter
from tests.helpers import family, tiny_model

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Branch:
    """A model class, and what makes its forward take other code.

    Attributes:
        name: The class.
        inputs: Returns what changes in the example inputs; None leaves an argument out.
        config: What changes in the tiny configuration.
        prepare: Does to the model what the branch needs; returns the model to call if it is another one.
    """

    name: str
    inputs: Callable[[Inputs], Inputs] = lambda known: {}
    config: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], Any] = lambda model: None

    def model(self) -> Any:
        """Return a tiny model of random numbers."""
        model = tiny_model(self.name, stock=True, **self.config)
        return self.prepare(model) or model

    def arguments(self, model: Any) -> Inputs:
        """Return the inputs of the branch."""
        known = self.known(model)
        return known | self.inputs(known)

    def known(self, model: Any) -> Inputs:
        """Return the example inputs that stand beside the plan."""
        known = example_inputs(model.transformer if isinstance(model, WithCache) else model)
        assert known is not None
        return known

    def plan(self, model: Any) -> dict[str, Any]:
        """Return the family's plan."""
        prefix = "transformer." if isinstance(model, WithCache) else ""
        return {prefix + key: style for key, style in family(self.name).PLAN.items()}


class WithCache(nn.Module):
    """Two steps of FLUX.2: the keys and values of 5 reference tokens are kept in the first and read in the second."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, return_dict: bool = True, **inputs: Any) -> tuple[Tensor, Tensor]:
        first, cache = self.transformer(
            **inputs, kv_cache_mode="extract", num_ref_tokens=5, return_dict=False
        )
        inputs["hidden_states"], inputs["img_ids"] = inputs["hidden_states"][:, 5:], inputs["img_ids"][5:]
        (second,) = self.transformer(**inputs, kv_cache_mode="cached", kv_cache=cache, return_dict=False)
        return first, second


class WithGivenImage(WithCache):
    """Two steps of GLM-Image: the keys and values of a given image are kept in the first and read in the second."""

    def forward(self, return_dict: bool = True, **inputs: Any) -> tuple[Tensor, Tensor]:
        from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

        cache = GlmImageKVCache(len(self.transformer.transformer_blocks))
        cache.set_mode("write")
        given = {key: value[:1] for key, value in inputs.items() if key != "attention_mask"}
        given["encoder_hidden_states"] = given["encoder_hidden_states"][:, :0]
        (first,) = self.transformer(**given, kv_caches=cache, return_dict=False)
        cache.set_mode("read")
        inputs["attention_mask"] = None  # its code knows no mask over kept tokens
        (second,) = self.transformer(**inputs, kv_caches=cache, return_dict=False)
        return first, second


class WithPrefix(WithCache):
    """Two steps of Qwen-Image 2.1: keys and values of all but the drawn image are kept in the first, then read."""

    def forward(self, return_dict: bool = True, **inputs: Any) -> tuple[Tensor, Tensor]:
        from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

        cache = QwenImage21KVCache(len(self.transformer.transformer_blocks))
        (first,) = self.transformer(**inputs, kv_cache=cache, kv_cache_mode="extract", return_dict=False)
        inputs["timestep"] = inputs["timestep"] / 2
        (second,) = self.transformer(**inputs, kv_cache=cache, kv_cache_mode="cached", return_dict=False)
        return first, second


class WithEarlierChunks(WithCache):
    """Two steps of AnyFlow-FAR: keys and values of all chunks but the last are kept in room for all heads, and read."""

    def forward(self, return_dict: bool = True, **inputs: Any) -> tuple[Tensor]:
        config, (*given, _) = self.transformer.config, inputs["chunk_partition"]
        text, size = inputs["encoder_hidden_states"], inputs["hidden_states"].shape
        room = (2, size[0], config.num_attention_heads, sum(given) * size[-1] * size[-2])
        kept = [
            {
                name: torch.zeros(*room, config.attention_head_dim)
                for name in ("full_cache", "compressed_cache")
            }
            for _ in self.transformer.blocks
        ]
        steps = ("hidden_states", "timestep", "r_timestep")
        first = {name: inputs[name][:, : sum(given)] for name in steps} | {"encoder_hidden_states": text}
        second = {name: inputs[name][:, sum(given) :] for name in steps} | {"encoder_hidden_states": text}
        flag = {"num_cached_chunks": len(given), "is_cache_step": True}
        self.transformer(**first, chunk_partition=given, kv_cache=kept, kv_cache_flag=flag)
        flag = {"num_cached_chunks": len(given), "is_cache_step": False}
        chunks = inputs["chunk_partition"]
        found = self.transformer(**second, chunk_partition=chunks, kv_cache=kept, kv_cache_flag=flag)
        return (found.sample,)


class WithReference(WithCache):
    """Two passes of Wan Animate 2: over a reference, and over frames that attend to what was kept of it."""

    def forward(self, return_dict: bool = True, **inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
        from diffusers.models.transformers import transformer_wan_animate_2 as wan

        (first,) = self.transformer(**inputs, return_dict=False)
        later = {
            "kv_cache_mode": "cached",
            "reference_grid_sizes": inputs["offset_grid_sizes"].repeat(len(inputs["hidden_states"]), 1),
            "origin_len": 9,
            "origin_area": [80, 48],
        }

        def uncompiled(*args: Any, _compile: bool, **options: Any) -> Any:
            return create_block_mask(*args, **options)

        with mock.patch.object(wan, "create_block_mask", uncompiled):
            (second,) = self.transformer(**inputs | later, return_dict=False)
        return first, second


class WithWindows(WithCache):
    """Three windows of the refiner of SANA-WM: keys are kept without positions, and with them; then both are read."""

    def forward(self, return_dict: bool = True, **inputs: Any) -> tuple[Tensor, ...]:
        from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

        cache, found = SanaWMRefinerKVCache(len(self.transformer.transformer_blocks)), []
        cache.sink_pe = inputs["video_rotary_emb"]
        for mode in ("capture_pre_rope", "inject_and_capture_post_rope", "inject"):
            found += self.transformer(**inputs, kv_cache=cache, kv_cache_mode=mode, return_dict=False)
            for layer in cache.layer_caches if mode == "capture_pre_rope" else ():
                layer.store_sink(*layer.get_captured_pre_rope())
            for layer in cache.layer_caches if mode == "inject_and_capture_post_rope" else ():
                layer.store_history(*layer.get_captured_post_rope())
        return tuple(found)


def _with_cache(model: Any) -> WithCache:
    from diffusers.models.transformers import transformer_flux2 as flux2

    for block in model.transformer_blocks:
        block.attn.set_processor(flux2.Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(flux2.Flux2KVParallelSelfAttnProcessor())
    return WithCache(model)


def _noise(*shape: int, seed: int = 11) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _residuals(count: int, width: int = 48, tokens: int = 15, batch: int = 3) -> list[Tensor]:
    """Return what a ControlNet adds behind the blocks."""
    return [_noise(batch, tokens, width, seed=seed) for seed in range(count)]


def _left_out(*names: str) -> Callable[[Inputs], Inputs]:
    return lambda known: dict.fromkeys(names)


def _attention_mask(argument: str, tokens: int) -> Callable[[Inputs], Inputs]:
    """Return attention arguments with a mask over all tokens that hides the first two of the last sample."""
    mask = torch.ones(3, 1, 1, tokens, dtype=torch.bool)
    mask[-1, ..., :2] = False
    return lambda known: {argument: {"attention_mask": mask}}


def _bias(*shape: int) -> Tensor:
    """Return a mask as a number that is added to the scores: the last two tokens are hidden."""
    bias = torch.zeros(shape)
    bias[..., -2:] = -10000.0
    return bias


def _two_images(known: Inputs) -> Inputs:
    return {"img_shapes": [[(1, 3, 3), (1, 3, 2)]] * 3}


def _layers(known: Inputs) -> Inputs:
    return _two_images(known) | {"additional_t_cond": torch.tensor([0, 1, 0])}


def _captions(known: Inputs, length: int) -> list[Tensor]:
    return [_noise(length, known["cap_feats"][0].shape[-1], seed=seed) for seed in range(len(known["x"]))]


def _plain_image(known: Inputs) -> Inputs:
    """Return inputs without clean images and features of them, for a Z-Image that edits."""
    images = [pair[-1] for pair in known["x"]]
    captions = [pair[-1] for pair in known["cap_feats"]]
    return {"x": images, "cap_feats": captions, "siglip_feats": None, "image_noise_mask": None}


def _no_clean_image(known: Inputs) -> Inputs:
    return {"x": [[None, pair[-1]] for pair in known["x"]]}


def _only_drawn(known: Inputs) -> Inputs:
    """Return inputs of OmniGen for the time and the image that is drawn: the last 16 tokens."""
    mask = known["attention_mask"][:, -16:, -16:]
    return {"input_ids": None, "attention_mask": mask, "position_ids": known["position_ids"][:, :16]}


def _clean_frames(known: Inputs) -> Inputs:
    """Return clean frames for the chunks that AnyFlow-FAR keeps in full, the last two."""
    frames = sum(known["chunk_partition"][-2:])
    return {
        "clean_hidden_states": known["hidden_states"][:, -frames:].flip(1),
        "clean_timestep": torch.ones(3, frames, dtype=torch.long),
    }


def _in_patches(known: Inputs) -> Inputs:
    """Return inputs without a part to fill in, which Stable Audio 3 takes only without patches."""
    return {"local_add_cond": None}


FLUX, FLUX2, QWEN = "FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel"
SD3, LTX, ZIMAGE = "SD3Transformer2DModel", "LTXVideoTransformer3DModel", "ZImageTransformer2DModel"
HUNYUAN, LUMINA = "HunyuanVideoTransformer3DModel", "Lumina2Transformer2DModel"
KREA2, IDEOGRAM4 = "Krea2Transformer2DModel", "Ideogram4Transformer2DModel"
ERNIE, OMNIGEN, PRX = "ErnieImageTransformer2DModel", "OmniGenTransformer2DModel", "PRXTransformer2DModel"
STABLE_AUDIO, STABLE_AUDIO3 = "StableAudioDiTModel", "StableAudio3DiTModel"
JOY_PLUS, LUMINA_NEXT = "JoyImageEditPlusTransformer3DModel", "LuminaNextDiT2DModel"
COGVIDEOX, COGVIEW4 = "CogVideoXTransformer3DModel", "CogView4Transformer2DModel"
GLM, LATTE, PRIOR = "GlmImageTransformer2DModel", "LatteTransformer3DModel", "PriorTransformer"
COSMOS, PIXART = "CosmosTransformer3DModel", "PixArtTransformer2DModel"
EASYANIMATE = "EasyAnimateTransformer3DModel"
BRIA, BRIA_FIBO, BRIA_FIBO2 = (f"{name}Transformer2DModel" for name in ("Bria", "BriaFibo", "BriaFibo2"))
CHROMA, OVIS, QWEN21 = (f"{name}Transformer2DModel" for name in ("Chroma", "OvisImage", "QwenImage21"))
HUNYUAN15, HUNYUAN_IMAGE = "HunyuanVideo15Transformer3DModel", "HunyuanImageTransformer2DModel"
FRAMEPACK, MOTIF = "HunyuanVideoFramepackTransformer3DModel", "MotifVideoTransformer3DModel"
ANYFLOW_FAR, WAN_ANIMATE2 = "AnyFlowFARTransformer3DModel", "WanAnimate2Transformer3DModel"
REFINER = "SanaWMLTX2RefinerTransformer3DModel"

BRANCHES: dict[str, Branch] = {
    "flux without guidance": Branch(FLUX, config={"guidance_embeds": False}),
    "flux with ControlNet residuals": Branch(
        FLUX,
        lambda known: {
            "controlnet_block_samples": _residuals(2),
            "controlnet_single_block_samples": _residuals(1),
        },
    ),
    "flux with repeated ControlNet residuals": Branch(
        FLUX, lambda known: {"controlnet_block_samples": _residuals(2), "controlnet_blocks_repeat": True}
    ),
    "flux with an attention mask": Branch(FLUX, _attention_mask("joint_attention_kwargs", 22)),
    "flux with an IP adapter": Branch(FLUX, prepare=lambda model: load_flux_adapters(model, (14,))),
    "flux with two IP adapters": Branch(FLUX, prepare=load_flux_adapters),
    "flux2 without guidance": Branch(FLUX2, config={"guidance_embeds": False}),
    "flux2 with guidance left out": Branch(FLUX2, _left_out("guidance")),
    "flux2 with an attention mask": Branch(FLUX2, _attention_mask("joint_attention_kwargs", 22)),
    "flux2 with a cache of reference tokens": Branch(FLUX2, prepare=_with_cache),
    "qwen-image without a mask": Branch(QWEN, _left_out("encoder_hidden_states_mask")),
    "qwen-image with ControlNet residuals": Branch(
        QWEN, lambda known: {"controlnet_block_samples": _residuals(2)}
    ),
    "qwen-image edit with a reference at time zero": Branch(QWEN, _two_images, {"zero_cond_t": True}),
    "qwen-image layered": Branch(QWEN, _layers, {"use_additional_t_cond": True, "use_layer3d_rope": True}),
    "sd3 with ControlNet residuals": Branch(
        SD3, lambda known: {"block_controlnet_hidden_states": _residuals(2)}
    ),
    "sd3 with a skipped layer": Branch(SD3, lambda known: {"skip_layers": [1]}),
    "sd3 with a chunked feed-forward": Branch(SD3, prepare=lambda model: model.enable_forward_chunking(1)),
    "sd3 with an IP adapter": Branch(SD3, prepare=load_sd3_adapter),
    "sd3 with an IP adapter and no image": Branch(
        SD3, _left_out("joint_attention_kwargs"), prepare=load_sd3_adapter
    ),
    "ltx without a mask": Branch(LTX, _left_out("encoder_attention_mask")),
    "ltx with a mask that is a bias": Branch(LTX, lambda known: {"encoder_attention_mask": _bias(3, 1, 7)}),
    "ltx with a timestep for each token": Branch(
        LTX, lambda known: {"timestep": torch.arange(3 * 45).view(3, 45)}
    ),
    "ltx without a scale of its positions": Branch(LTX, _left_out("rope_interpolation_scale")),
    "ltx with given positions": Branch(
        LTX,
        lambda known: {
            "video_coords": 20 * _noise(3, 3, 45).abs(),
            **dict.fromkeys(("num_frames", "height", "width", "rope_interpolation_scale")),
        },
    ),
    "hunyuan-video without guidance": Branch(HUNYUAN, config={"guidance_embeds": False}),
    "hunyuan-video without padding": Branch(
        HUNYUAN, lambda known: {"encoder_attention_mask": torch.ones(3, 7, dtype=torch.long)}
    ),
    "lumina2 without padding": Branch(
        LUMINA, lambda known: {"encoder_attention_mask": torch.ones(3, 7, dtype=torch.bool)}
    ),
    "z-image with ControlNet residuals": Branch(
        ZIMAGE, lambda known: {"controlnet_block_samples": {1: _noise(3, 96, 48)}}
    ),
    "z-image with texts of one length": Branch(ZIMAGE, lambda known: {"cap_feats": _captions(known, 7)}),
    "z-image edit without features": Branch(
        ZIMAGE, lambda known: {"siglip_feats": [None] * 3}, {"siglip_feat_dim": 28}
    ),
    "z-image edit of nothing": Branch(ZIMAGE, _plain_image, {"siglip_feat_dim": 28}),
    "z-image edit without a clean image": Branch(
        ZIMAGE, _no_clean_image, {"siglip_feat_dim": 28, "in_channels": 16}
    ),
    "cogvideox without an offset": Branch(COGVIDEOX, config={"ofs_embed_dim": None}),
    "cogvideox without rotary positions": Branch(COGVIDEOX, _left_out("image_rotary_emb")),
    "cogvideox with an attention mask": Branch(
        COGVIDEOX, lambda known: {"attention_kwargs": {"attention_mask": _bias(3, 52)}}
    ),
    "krea2 without a mask": Branch(KREA2, _left_out("encoder_attention_mask")),
    "ideogram4 with a timestep for each token": Branch(
        IDEOGRAM4, lambda known: {"timestep": torch.arange(3 * 23).view(3, 23) / 69}
    ),
    # The class does not project an empty text: it must have the width of the model.
    "ernie-image without text": Branch(
        ERNIE, lambda known: {"text_bth": torch.zeros(3, 0, 48), "text_lens": torch.zeros(3)}
    ),
    "omnigen without text": Branch(OMNIGEN, _only_drawn),
    "omnigen with a long text": Branch(OMNIGEN, lambda known: {"position_ids": known["position_ids"] + 20}),
    "omnigen without a mask": Branch(OMNIGEN, _left_out("attention_mask")),
    "prx without a mask": Branch(PRX, _left_out("attention_mask")),
    "stable-audio without masks": Branch(STABLE_AUDIO, _left_out("attention_mask", "encoder_attention_mask")),
    "stable-audio without rotary positions": Branch(STABLE_AUDIO, _left_out("rotary_embedding")),
    "stable-audio-3 without a part to fill in": Branch(STABLE_AUDIO3, _left_out("local_add_cond")),
    "stable-audio-3 without padding": Branch(STABLE_AUDIO3, _left_out("encoder_attention_mask")),
    "stable-audio-3 without memory": Branch(STABLE_AUDIO3, config={"num_memory_tokens": 0}),
    "stable-audio-3 with patches": Branch(STABLE_AUDIO3, _in_patches, {"patch_size": 3}),
    "joy-image-edit-plus without a mask": Branch(JOY_PLUS, _left_out("encoder_hidden_states_mask")),
    "lumina-next with attention in proportion": Branch(
        LUMINA_NEXT, lambda known: {"cross_attention_kwargs": {"base_sequence_length": 9}}
    ),
    "cogview4 without a mask": Branch(COGVIEW4, _left_out("attention_mask")),
    "cosmos without a frame rate": Branch(COSMOS, _left_out("fps")),
    "easyanimate with latents to follow": Branch(
        EASYANIMATE, lambda known: {"inpaint_latents": None, "control_latents": _noise(3, 5, 3, 10, 6)}
    ),
    "glm-image without a mask": Branch(GLM, _left_out("attention_mask")),
    "glm-image with a cache of a given image": Branch(GLM, prepare=WithGivenImage),
    "latte without attention in time": Branch(LATTE, lambda known: {"enable_temporal_attentions": False}),
    "pixart with a mask of the image": Branch(
        PIXART, lambda known: {"attention_mask": (_bias(3, 15) == 0).float()}
    ),
    "anyflow-far with clean frames": Branch(ANYFLOW_FAR, _clean_frames),
    "anyflow-far with a cache of chunks": Branch(ANYFLOW_FAR, prepare=WithEarlierChunks),
    "refiner with a cache of windows": Branch(REFINER, prepare=WithWindows),
    "refiner with a cache of windows, positions by head": Branch(
        REFINER, config={"rope_type": "split"}, prepare=WithWindows
    ),
    "prior without a mask": Branch(PRIOR, _left_out("attention_mask")),
    # Its code takes the first tokens of the image for text and adds nothing to them.
    "bria with ControlNet residuals": Branch(
        BRIA,
        lambda known: {
            "controlnet_block_samples": _residuals(2),
            "controlnet_single_block_samples": _residuals(1, tokens=8),
        },
    ),
    "bria-fibo without guidance": Branch(BRIA_FIBO, config={"guidance_embeds": False}),
    "bria-fibo with an attention mask": Branch(BRIA_FIBO, _attention_mask("joint_attention_kwargs", 22)),
    "bria-fibo-2 without a mask": Branch(BRIA_FIBO2, _left_out("encoder_attention_mask")),
    "bria-fibo-2 without an image": Branch(BRIA_FIBO2, _left_out("context_latents")),
    "chroma without a mask": Branch(CHROMA, _left_out("attention_mask")),
    "chroma with ControlNet residuals": Branch(
        CHROMA,
        lambda known: {
            "controlnet_block_samples": _residuals(1),
            "controlnet_single_block_samples": _residuals(1),
            "controlnet_blocks_repeat": True,
        },
    ),
    "ovis-image with an attention mask": Branch(OVIS, _attention_mask("joint_attention_kwargs", 22)),
    "motif-video without a mask": Branch(MOTIF, _left_out("encoder_attention_mask")),
    "motif-video without an image": Branch(MOTIF, _left_out("image_embeds")),
    "hunyuan-video-1.5 without a second time": Branch(HUNYUAN15, _left_out("timestep_r")),
    "framepack without guidance": Branch(FRAMEPACK, config={"guidance_embeds": False}),
    "hunyuan-image without guidance": Branch(HUNYUAN_IMAGE, config={"guidance_embeds": False}),
    "hunyuan-image without a second time": Branch(HUNYUAN_IMAGE, _left_out("timestep_r")),
    "hunyuan-image without a second text": Branch(HUNYUAN_IMAGE, _left_out("encoder_hidden_states_2")),
    "qwen-image-2.1 without a mask": Branch(QWEN21, _left_out("encoder_hidden_states_mask")),
    "qwen-image-2.1 with a cache of its prefix": Branch(QWEN21, prepare=WithPrefix),
}
"""What may be given to a family and what may be left out, one at a time."""

UNFOLLOWED: dict[str, Branch] = {
    # Writes slices into zeros of a rank's size, through a view.
    "wan-animate-2 with a cache of a reference": Branch(WAN_ANIMATE2, prepare=WithReference),
}
"""Branches that the static check does not follow, and takes for wrong: they are run on ranks only."""
