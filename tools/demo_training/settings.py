"""Every number of the recipe that made the demo model, with the values it was made with.

Owns the settings of training. What the parts look like (their widths and depths) stands where they are built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Schedule:
    """How long a stage trains: its learning rate rises in a straight line, then falls along half a cosine.

    The weights that are kept are a moving average over the steps; it remembers less in the first steps, so that
    it forgets the random weights that training started from.
    """

    steps: int
    batch: int
    warm_up: int
    final_rate: float
    averaging: float
    averaging_warm_up: int

    def rate(self, step: int) -> float:
        """Tell the learning rate at a step, as a fraction of the highest one."""
        rise = min(1.0, (step + 1) / self.warm_up)
        fall = 0.5 + 0.5 * math.cos(math.pi * step / self.steps)
        return rise * (self.final_rate + (1 - self.final_rate) * fall)

    def memory(self, step: int) -> float:
        """Tell how much of the moving average stays when the weights of a step enter it."""
        return min(self.averaging, (step + 1) / (step + self.averaging_warm_up))

    def scaled(self, factor: float) -> Schedule:
        """Shorten or lengthen the stage; the warm-up gets shorter with it, but never longer."""
        warm_up = max(1, round(self.warm_up * min(1.0, factor)))
        return replace(self, steps=max(1, round(self.steps * factor)), warm_up=warm_up)


@dataclass(frozen=True)
class TokenizerSettings:
    """How the tokenizer is made: from this many captions, with room for this many tokens."""

    captions: int = 20_000
    vocabulary: int = 392


@dataclass(frozen=True)
class AutoencoderSettings:
    """How the autoencoder learns to squeeze a picture into 4 x 16 x 16 numbers and to draw it again."""

    schedule: Schedule = Schedule(1500, 16, warm_up=50, final_rate=0.0, averaging=0.995, averaging_warm_up=10)
    pictures: int = 6_000
    measured_pictures: int = 1_600
    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 1e-4
    edge_weight: float = 2.0
    kl_weight: float = 2e-4


@dataclass(frozen=True)
class DecoderSettings:
    """How the decoder alone is sharpened, on latents as imprecise as the transformer will make them."""

    schedule: Schedule = Schedule(
        1600, 16, warm_up=30, final_rate=0.01, averaging=0.995, averaging_warm_up=10
    )
    pictures: int = 6_000
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 1e-4
    edge_weight: float = 2.0
    latent_noise: float = 0.06


@dataclass(frozen=True)
class DenoiserSettings:
    """How transformer and text encoder together learn to turn noise into the latents of a captioned picture."""

    schedule: Schedule = Schedule(
        3000, 64, warm_up=60, final_rate=0.02, averaging=0.998, averaging_warm_up=20
    )
    pairs: int = 32_000
    matrix_learning_rate: float = 3e-3
    matrix_weight_decay: float = 0.01
    momentum: float = 0.95
    other_learning_rate: float = 2e-3
    other_betas: tuple[float, float] = (0.9, 0.98)
    dropped_captions: float = 0.1
    noise_mean: float = 0.4
    noise_spread: float = 1.1
    uniform_noise: float = 0.1


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run; the default is the run that made the shipped model."""

    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    autoencoder: AutoencoderSettings = field(default_factory=AutoencoderSettings)
    decoder: DecoderSettings = field(default_factory=DecoderSettings)
    denoiser: DenoiserSettings = field(default_factory=DenoiserSettings)

    def scaled(self, steps: float = 1.0, data: float = 1.0) -> Recipe:
        """Change the number of training steps, and of rendered pictures and captions, by a factor each."""

        def portion(count: int) -> int:
            return max(1, round(count * data))

        return Recipe(
            replace(self.tokenizer, captions=portion(self.tokenizer.captions)),
            replace(
                self.autoencoder,
                schedule=self.autoencoder.schedule.scaled(steps),
                pictures=portion(self.autoencoder.pictures),
                measured_pictures=portion(self.autoencoder.measured_pictures),
            ),
            replace(
                self.decoder,
                schedule=self.decoder.schedule.scaled(steps),
                pictures=portion(self.decoder.pictures),
            ),
            replace(
                self.denoiser,
                schedule=self.denoiser.schedule.scaled(steps),
                pairs=portion(self.denoiser.pairs),
            ),
        )
