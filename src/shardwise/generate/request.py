"""What `shardwise generate` was asked for, and the arguments of the pipeline that follow from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.demo import CALL, demo_model_path
from shardwise.errors import UnsupportedOption

EMBEDDED = "embedded"
LARGEST_SEED = 2**63 - 1
OPTIONS = {
    "prompt": "--prompt",
    "negative_prompt": "--negative-prompt",
    "num_inference_steps": "--steps",
    "guidance_scale": "--guidance",
    "width": "--size",
    "height": "--size",
    "num_frames": "--num-frames",
}
"""Argument of a pipeline -> the option that sets it."""
OURS = {"generator", "output_type", "return_dict", "num_images_per_prompt", "num_videos_per_prompt"}
"""Arguments of a pipeline that nobody else may set; --num-images says how many are drawn."""


@dataclass(frozen=True)
class Request:
    """What was asked for; plain data, the same on every rank.

    Attributes:
        model: A folder or hub id of a pipeline, or `"embedded"`.
        prompts: What to draw.
        negative_prompt: What not to draw.
        tp, cfg, dp, ulysses: Degrees; their product is the number of ranks.
        steps, guidance, size, frames: Arguments of the pipeline; None leaves the choice to it. `size` is width, height.
        seed: Of the first picture; picture i is drawn from noise of seed + i.
        images: Pictures of each prompt.
        lora: A file or hub id of a LoRA adapter.
        quantize: `"int8"`, for the weights of transformers.
        spread_decode: Whether the VAE's tiles are decoded by different ranks.
        unload_text_encoders: Whether they are freed before the first denoising step.
        components: Those to shard; None for all that can be.
        dtype: Name of a torch dtype; None for bfloat16 on CUDA and float32 on CPU.
        out: Folder for the pictures.
        events: File for what happens, as JSON lines.
        fps: Frames of a video per second.
        arguments: Further arguments of the pipeline.
        timeout: Seconds that a rank waits for the others while generating.
        load_timeout: The same while loading and writing.
    """

    model: str
    prompts: tuple[str, ...]
    negative_prompt: str | None = None
    tp: int = 1
    cfg: int = 1
    dp: int = 1
    ulysses: int = 1
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    size: tuple[int, int] | None = None
    images: int = 1
    frames: int | None = None
    lora: str | None = None
    quantize: str | None = None
    spread_decode: bool = False
    unload_text_encoders: bool = False
    components: tuple[str, ...] | None = None
    dtype: str | None = None
    out: str = "."
    events: str | None = None
    fps: int = 16
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 120.0
    load_timeout: float = 7200.0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.cfg * self.dp * self.ulysses

    @property
    def location(self) -> str:
        """The folder or hub id of the model."""
        return str(demo_model_path()) if self.model == EMBEDDED else self.model

    @property
    def pictures(self) -> list[str]:
        """The prompt of each picture, in the order of their seeds."""
        return [prompt for prompt in self.prompts for _ in range(self.images)]

    def call(self, pipeline: str, accepted: Collection[str]) -> dict[str, Any]:
        """Return the arguments to call the pipeline with, all but the generators.

        Args:
            pipeline: Name of the pipeline's class, for messages.
            accepted: Names of the arguments that it takes.

        Raises:
            UnsupportedOption: something was asked for that the pipeline does not take, or that is ours to say.
        """
        for name in OURS & self.arguments.keys():
            raise UnsupportedOption(f"--arguments: {name} follows from other options; leave it out")
        width, height = self.size or (None, None)
        negative = self.negative_prompt
        asked = {
            "prompt": self._one_or_all(self.pictures),
            "negative_prompt": self._one_or_all([negative] * len(self.pictures))
            if negative is not None
            else None,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "width": width,
            "height": height,
            "num_frames": self.frames,
        }
        asked = {name: value for name, value in asked.items() if value is not None} | dict(self.arguments)
        for name in asked:
            if name not in accepted:
                option = "--arguments" if name in self.arguments else OPTIONS[name]
                raise UnsupportedOption(
                    f"{option}: {pipeline} takes no {name}; it takes {', '.join(sorted(accepted))}"
                )
        return {**(CALL if self.model == EMBEDDED else {}), **asked}

    def as_dict(self) -> dict[str, Any]:
        """Return the request as plain data that `json` can write."""
        return asdict(self)

    def _one_or_all(self, texts: list[str]) -> str | list[str]:
        """Return a single text as it is, where replicas have nothing to share out: not every pipeline takes a list."""
        return texts[0] if len(texts) == 1 and self.dp == 1 else texts
