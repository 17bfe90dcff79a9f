"""The tensor parallel model classes: each is the diffusers class of its name, with a plan and sharded loading.

Any other model class of diffusers can be imported from here as well: its plan is derived from names.

One file per family holds the plan, the class, and a tiny configuration with inputs to prove the plan on.
Adding a model is adding such a file and a line here. Classes are imported when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.models.families.ace_step import AceStepTransformer1DModel
    from shardwise.models.families.allegro import AllegroTransformer3DModel
    from shardwise.models.families.anyflow import AnyFlowTransformer3DModel
    from shardwise.models.families.anyflow_far import AnyFlowFARTransformer3DModel
    from shardwise.models.families.aura_flow import AuraFlowTransformer2DModel
    from shardwise.models.families.bria import BriaTransformer2DModel
    from shardwise.models.families.bria_fibo import BriaFiboTransformer2DModel
    from shardwise.models.families.bria_fibo2 import BriaFibo2Transformer2DModel
    from shardwise.models.families.chroma import ChromaTransformer2DModel
    from shardwise.models.families.chrono_edit import ChronoEditTransformer3DModel
    from shardwise.models.families.cogvideox import CogVideoXTransformer3DModel
    from shardwise.models.families.cogview3 import CogView3PlusTransformer2DModel
    from shardwise.models.families.cogview4 import CogView4Transformer2DModel
    from shardwise.models.families.consisid import ConsisIDTransformer3DModel
    from shardwise.models.families.cosmos import CosmosTransformer3DModel
    from shardwise.models.families.cosmos3 import Cosmos3OmniTransformer
    from shardwise.models.families.dit import DiTTransformer2DModel
    from shardwise.models.families.dreamlite import DreamLiteTransformer2DModel
    from shardwise.models.families.easyanimate import EasyAnimateTransformer3DModel
    from shardwise.models.families.ernie_image import ErnieImageTransformer2DModel
    from shardwise.models.families.flux import FluxTransformer2DModel
    from shardwise.models.families.flux2 import Flux2Transformer2DModel
    from shardwise.models.families.flux3 import Flux3Transformer2DModel
    from shardwise.models.families.glm_image import GlmImageTransformer2DModel
    from shardwise.models.families.helios import HeliosTransformer3DModel
    from shardwise.models.families.hidream import HiDreamImageTransformer2DModel
    from shardwise.models.families.hunyuan_dit import HunyuanDiT2DModel
    from shardwise.models.families.hunyuan_image import HunyuanImageTransformer2DModel
    from shardwise.models.families.hunyuan_video import HunyuanVideoTransformer3DModel
    from shardwise.models.families.hunyuan_video15 import HunyuanVideo15Transformer3DModel
    from shardwise.models.families.hunyuan_video_framepack import HunyuanVideoFramepackTransformer3DModel
    from shardwise.models.families.ideogram4 import Ideogram4Transformer2DModel
    from shardwise.models.families.joy_image import JoyImageEditTransformer3DModel
    from shardwise.models.families.joy_image_plus import JoyImageEditPlusTransformer3DModel
    from shardwise.models.families.kandinsky5 import Kandinsky5Transformer3DModel
    from shardwise.models.families.kandinsky6 import Kandinsky6Transformer3DModel
    from shardwise.models.families.kandinsky6_sr import Kandinsky6SRTransformer3DModel
    from shardwise.models.families.krea2 import Krea2Transformer2DModel
    from shardwise.models.families.latte import LatteTransformer3DModel
    from shardwise.models.families.longcat_audio import LongCatAudioDiTTransformer
    from shardwise.models.families.longcat_image import LongCatImageTransformer2DModel
    from shardwise.models.families.ltx import LTXVideoTransformer3DModel
    from shardwise.models.families.ltx2 import LTX2VideoTransformer3DModel
    from shardwise.models.families.lumina2 import Lumina2Transformer2DModel
    from shardwise.models.families.lumina_next import LuminaNextDiT2DModel
    from shardwise.models.families.minimax_h3 import MiniMaxH3Transformer3DModel
    from shardwise.models.families.minimax_music3 import MiniMaxMusic3Transformer1DModel
    from shardwise.models.families.minimax_music3_rvq import MiniMaxMusic3RVQDepthDecoder
    from shardwise.models.families.mochi import MochiTransformer3DModel
    from shardwise.models.families.motif_video import MotifVideoTransformer3DModel
    from shardwise.models.families.nucleusmoe import NucleusMoEImageTransformer2DModel
    from shardwise.models.families.omnigen import OmniGenTransformer2DModel
    from shardwise.models.families.ovis_image import OvisImageTransformer2DModel
    from shardwise.models.families.pixart import PixArtTransformer2DModel
    from shardwise.models.families.prior import PriorTransformer
    from shardwise.models.families.prx import PRXTransformer2DModel
    from shardwise.models.families.qwen_image import QwenImageTransformer2DModel
    from shardwise.models.families.qwen_image21 import QwenImage21Transformer2DModel
    from shardwise.models.families.rfd4_proteina import RFD4ProteinaTransformer
    from shardwise.models.families.sana import SanaTransformer2DModel
    from shardwise.models.families.sana_video import SanaVideoTransformer3DModel
    from shardwise.models.families.sana_wm import SanaWMTransformer3DModel
    from shardwise.models.families.sana_wm_refiner import SanaWMLTX2RefinerTransformer3DModel
    from shardwise.models.families.sd3 import SD3Transformer2DModel
    from shardwise.models.families.skyreels_v2 import SkyReelsV2Transformer3DModel
    from shardwise.models.families.stable_audio import StableAudioDiTModel
    from shardwise.models.families.stable_audio3 import StableAudio3DiTModel
    from shardwise.models.families.t5_film import T5FilmDecoder
    from shardwise.models.families.transformer_2d import Transformer2DModel
    from shardwise.models.families.transformer_temporal import TransformerTemporalModel
    from shardwise.models.families.wan import WanTransformer3DModel
    from shardwise.models.families.wan_animate import WanAnimateTransformer3DModel
    from shardwise.models.families.wan_animate2 import WanAnimate2Transformer3DModel
    from shardwise.models.families.wan_vace import WanVACETransformer3DModel
    from shardwise.models.families.z_image import ZImageTransformer2DModel

FAMILIES = {
    "AceStepTransformer1DModel": "ace_step",
    "AllegroTransformer3DModel": "allegro",
    "AnyFlowFARTransformer3DModel": "anyflow_far",
    "AnyFlowTransformer3DModel": "anyflow",
    "AuraFlowTransformer2DModel": "aura_flow",
    "BriaFibo2Transformer2DModel": "bria_fibo2",
    "BriaFiboTransformer2DModel": "bria_fibo",
    "BriaTransformer2DModel": "bria",
    "ChromaTransformer2DModel": "chroma",
    "ChronoEditTransformer3DModel": "chrono_edit",
    "CogVideoXTransformer3DModel": "cogvideox",
    "CogView3PlusTransformer2DModel": "cogview3",
    "CogView4Transformer2DModel": "cogview4",
    "ConsisIDTransformer3DModel": "consisid",
    "Cosmos3OmniTransformer": "cosmos3",
    "CosmosTransformer3DModel": "cosmos",
    "DiTTransformer2DModel": "dit",
    "DreamLiteTransformer2DModel": "dreamlite",
    "EasyAnimateTransformer3DModel": "easyanimate",
    "ErnieImageTransformer2DModel": "ernie_image",
    "Flux2Transformer2DModel": "flux2",
    "Flux3Transformer2DModel": "flux3",
    "FluxTransformer2DModel": "flux",
    "GlmImageTransformer2DModel": "glm_image",
    "HeliosTransformer3DModel": "helios",
    "HiDreamImageTransformer2DModel": "hidream",
    "HunyuanDiT2DModel": "hunyuan_dit",
    "HunyuanImageTransformer2DModel": "hunyuan_image",
    "HunyuanVideo15Transformer3DModel": "hunyuan_video15",
    "HunyuanVideoFramepackTransformer3DModel": "hunyuan_video_framepack",
    "HunyuanVideoTransformer3DModel": "hunyuan_video",
    "Ideogram4Transformer2DModel": "ideogram4",
    "JoyImageEditPlusTransformer3DModel": "joy_image_plus",
    "JoyImageEditTransformer3DModel": "joy_image",
    "Kandinsky5Transformer3DModel": "kandinsky5",
    "Kandinsky6SRTransformer3DModel": "kandinsky6_sr",
    "Kandinsky6Transformer3DModel": "kandinsky6",
    "Krea2Transformer2DModel": "krea2",
    "LTX2VideoTransformer3DModel": "ltx2",
    "LTXVideoTransformer3DModel": "ltx",
    "LatteTransformer3DModel": "latte",
    "LongCatAudioDiTTransformer": "longcat_audio",
    "LongCatImageTransformer2DModel": "longcat_image",
    "Lumina2Transformer2DModel": "lumina2",
    "LuminaNextDiT2DModel": "lumina_next",
    "MiniMaxH3Transformer3DModel": "minimax_h3",
    "MiniMaxMusic3RVQDepthDecoder": "minimax_music3_rvq",
    "MiniMaxMusic3Transformer1DModel": "minimax_music3",
    "MochiTransformer3DModel": "mochi",
    "MotifVideoTransformer3DModel": "motif_video",
    "NucleusMoEImageTransformer2DModel": "nucleusmoe",
    "OmniGenTransformer2DModel": "omnigen",
    "OvisImageTransformer2DModel": "ovis_image",
    "PRXTransformer2DModel": "prx",
    "PixArtTransformer2DModel": "pixart",
    "PriorTransformer": "prior",
    "QwenImage21Transformer2DModel": "qwen_image21",
    "QwenImageTransformer2DModel": "qwen_image",
    "RFD4ProteinaTransformer": "rfd4_proteina",
    "SD3Transformer2DModel": "sd3",
    "SanaTransformer2DModel": "sana",
    "SanaVideoTransformer3DModel": "sana_video",
    "SanaWMLTX2RefinerTransformer3DModel": "sana_wm_refiner",
    "SanaWMTransformer3DModel": "sana_wm",
    "SkyReelsV2Transformer3DModel": "skyreels_v2",
    "StableAudio3DiTModel": "stable_audio3",
    "StableAudioDiTModel": "stable_audio",
    "T5FilmDecoder": "t5_film",
    "Transformer2DModel": "transformer_2d",
    "TransformerTemporalModel": "transformer_temporal",
    "WanAnimate2Transformer3DModel": "wan_animate2",
    "WanAnimateTransformer3DModel": "wan_animate",
    "WanTransformer3DModel": "wan",
    "WanVACETransformer3DModel": "wan_vace",
    "ZImageTransformer2DModel": "z_image",
}
"""Class name -> the module of this package that holds it."""

__all__ = [
    "FAMILIES",
    "AceStepTransformer1DModel",
    "AllegroTransformer3DModel",
    "AnyFlowFARTransformer3DModel",
    "AnyFlowTransformer3DModel",
    "AuraFlowTransformer2DModel",
    "BriaFibo2Transformer2DModel",
    "BriaFiboTransformer2DModel",
    "BriaTransformer2DModel",
    "ChromaTransformer2DModel",
    "ChronoEditTransformer3DModel",
    "CogVideoXTransformer3DModel",
    "CogView3PlusTransformer2DModel",
    "CogView4Transformer2DModel",
    "ConsisIDTransformer3DModel",
    "Cosmos3OmniTransformer",
    "CosmosTransformer3DModel",
    "DiTTransformer2DModel",
    "DreamLiteTransformer2DModel",
    "EasyAnimateTransformer3DModel",
    "ErnieImageTransformer2DModel",
    "Flux2Transformer2DModel",
    "Flux3Transformer2DModel",
    "FluxTransformer2DModel",
    "GlmImageTransformer2DModel",
    "HeliosTransformer3DModel",
    "HiDreamImageTransformer2DModel",
    "HunyuanDiT2DModel",
    "HunyuanImageTransformer2DModel",
    "HunyuanVideo15Transformer3DModel",
    "HunyuanVideoFramepackTransformer3DModel",
    "HunyuanVideoTransformer3DModel",
    "Ideogram4Transformer2DModel",
    "JoyImageEditPlusTransformer3DModel",
    "JoyImageEditTransformer3DModel",
    "Kandinsky5Transformer3DModel",
    "Kandinsky6SRTransformer3DModel",
    "Kandinsky6Transformer3DModel",
    "Krea2Transformer2DModel",
    "LTX2VideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "LatteTransformer3DModel",
    "LongCatAudioDiTTransformer",
    "LongCatImageTransformer2DModel",
    "Lumina2Transformer2DModel",
    "LuminaNextDiT2DModel",
    "MiniMaxH3Transformer3DModel",
    "MiniMaxMusic3RVQDepthDecoder",
    "MiniMaxMusic3Transformer1DModel",
    "MochiTransformer3DModel",
    "MotifVideoTransformer3DModel",
    "NucleusMoEImageTransformer2DModel",
    "OmniGenTransformer2DModel",
    "OvisImageTransformer2DModel",
    "PRXTransformer2DModel",
    "PixArtTransformer2DModel",
    "PriorTransformer",
    "QwenImage21Transformer2DModel",
    "QwenImageTransformer2DModel",
    "RFD4ProteinaTransformer",
    "SD3Transformer2DModel",
    "SanaTransformer2DModel",
    "SanaVideoTransformer3DModel",
    "SanaWMLTX2RefinerTransformer3DModel",
    "SanaWMTransformer3DModel",
    "SkyReelsV2Transformer3DModel",
    "StableAudio3DiTModel",
    "StableAudioDiTModel",
    "T5FilmDecoder",
    "Transformer2DModel",
    "TransformerTemporalModel",
    "WanAnimate2Transformer3DModel",
    "WanAnimateTransformer3DModel",
    "WanTransformer3DModel",
    "WanVACETransformer3DModel",
    "ZImageTransformer2DModel",
]


def __getattr__(name: str) -> Any:
    """Import a model class when it is first asked for; one of diffusers without a plan here is made then."""
    if name in FAMILIES:
        return getattr(import_module(f"{__name__}.families.{FAMILIES[name]}"), name)
    if name.startswith("_"):
        raise AttributeError(name)
    cls = import_module(f"{__name__}.unplanned").class_of(name)
    if cls is None:
        raise AttributeError(f"shardwise.models has no {name}, and diffusers no model of that name")
    return globals().setdefault(name, cls)


def __dir__() -> list[str]:
    """List the model classes."""
    return sorted(__all__)
