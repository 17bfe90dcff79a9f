"""Train the demo model of shardwise from nothing: python -m tools.train_demo_model --out DIR.

Every picture and caption is made up by `shardwise.demo.world`; no file is read and nothing is downloaded. Five
stages follow each other: a tokenizer for the captions, an autoencoder for the pictures, a sharper decoder, a
transformer with its text encoder, and the folder that `DiffusionPipeline.from_pretrained` loads.

The defaults are the recipe of the shipped weights and take about an hour and a half on one core; set
OMP_NUM_THREADS to the cores to use. The shipped weights were trained with shortcuts that are left out here, since
they replaced parts of torch: bfloat16 copies of the weights and hand-written attention, rotary embedding and
RMSNorm, which took 12 ms of processor time for each pair of picture and caption where the plain modules take 20.
The same seed gives the same weights on the same kind of processor with the same number of threads.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import click
from tools.demo_training.autoencoder import new_autoencoder, sharpen_decoder, to_tensor, train_autoencoder
from tools.demo_training.captions import train_tokenizer
from tools.demo_training.denoiser import new_text_encoder, new_transformer, sample_pairs, train_denoiser
from tools.demo_training.fitting import seeded
from tools.demo_training.result import judge_model, save_pipeline
from tools.demo_training.settings import Recipe

from shardwise.demo.world import render, sample_scene


def train(recipe: Recipe, folder: Path, seed: int) -> dict[str, list[float]]:
    """Train a model by a recipe, write it to a folder, and return the losses of each stage."""
    rng = Random(seed)
    with seeded(seed):
        tokenizer = train_tokenizer(recipe.tokenizer, rng)
        click.echo(f"tokenizer: {len(tokenizer)} tokens")

        autoencoder = new_autoencoder()
        pictures = to_tensor([render(sample_scene(rng), rng) for _ in range(recipe.autoencoder.pictures)])
        losses = {"autoencoder": train_autoencoder(autoencoder, pictures, recipe.autoencoder)}

        pictures = to_tensor([render(sample_scene(rng), rng) for _ in range(recipe.decoder.pictures)])
        losses["decoder"] = sharpen_decoder(autoencoder, pictures, recipe.decoder)

        pairs = sample_pairs(autoencoder, tokenizer, recipe.denoiser.pairs, rng)
        click.echo(f"denoiser: {len(pairs.latents)} pairs encoded")
        transformer = new_transformer()
        text_encoder = new_text_encoder(tokenizer, recipe.tokenizer.vocabulary)
        losses["denoiser"] = train_denoiser(transformer, text_encoder, pairs, recipe.denoiser)
    save_pipeline(folder, tokenizer, autoencoder, text_encoder, transformer)
    return losses


@click.command()
@click.option(
    "--out",
    "folder",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to write the model to; it must be empty or not exist yet.",
)
@click.option("--seed", default=0, show_default=True, help="Where all randomness comes from.")
@click.option(
    "--steps-scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Train for this multiple of the recipe's steps.",
)
@click.option(
    "--data-scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Make up this multiple of the recipe's captions and pictures.",
)
@click.option(
    "--judge",
    "judged",
    default=40,
    show_default=True,
    type=click.IntRange(min=0),
    help="Let the finished model draw this many pictures and count the right ones.",
)
def main(folder: Path, seed: int, steps_scale: float, data_scale: float, judged: int) -> None:
    """Train the demo model from nothing and write it to a folder."""
    if folder.exists() and any(folder.iterdir()):
        raise click.BadParameter(f"{folder} is not empty", param_hint="--out")
    train(Recipe().scaled(steps_scale, data_scale), folder, seed)
    click.echo(f"written to {folder}")
    if judged:
        verdicts = judge_model(folder, judged, seed=2024)
        click.echo(f"{sum(verdict.right for verdict in verdicts)} of {judged} pictures judged right")


if __name__ == "__main__":
    main()
