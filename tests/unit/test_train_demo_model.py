"""The training program of the demo model: every stage learns, and what comes out is a pipeline that loads."""

from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline, Flux2KleinPipeline
from safetensors import safe_open
from tools.demo_training.autoencoder import (
    encode,
    new_autoencoder,
    picture_loss,
    sharpen_decoder,
    to_tensor,
    to_tokens,
    train_autoencoder,
)
from tools.demo_training.captions import tokenize, train_tokenizer
from tools.demo_training.denoiser import (
    TEXT_LAYERS,
    denoising_loss,
    embed,
    new_text_encoder,
    new_transformer,
    sample_pairs,
    train_denoiser,
)
from tools.demo_training.fitting import fit, seeded
from tools.demo_training.result import draw
from tools.demo_training.settings import (
    AutoencoderSettings,
    DecoderSettings,
    DenoiserSettings,
    Recipe,
    Schedule,
    TokenizerSettings,
)
from tools.train_demo_model import main, train

from shardwise.demo.world import render, sample_scene

CAPTIONS = [
    "a small red circle on the left on a white background",
    "two blue hearts on a black background",
    "",
]


def pictures(count: int) -> torch.Tensor:
    rng = Random(4)
    return to_tensor([render(sample_scene(rng), rng) for _ in range(count)])


def short(schedule: Schedule, steps: int) -> Schedule:
    return replace(schedule, steps=steps, batch=4, warm_up=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model after a few steps of every stage on a tiny pool of data."""
    recipe = Recipe().scaled(data=0.005)
    recipe = replace(
        recipe,
        autoencoder=replace(recipe.autoencoder, schedule=short(recipe.autoencoder.schedule, 4)),
        decoder=replace(recipe.decoder, schedule=short(recipe.decoder.schedule, 5)),
        denoiser=replace(recipe.denoiser, schedule=short(recipe.denoiser.schedule, 6)),
    )
    folder = tmp_path_factory.mktemp("demo") / "model"
    losses = train(recipe, folder, seed=1)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return SimpleNamespace(folder=folder, losses=losses, pipeline=pipeline)


# ---------------------------------------------------------------- what comes out


def test_every_stage_takes_the_steps_it_was_given(trained: SimpleNamespace) -> None:
    assert {stage: len(losses) for stage, losses in trained.losses.items()} == {
        "autoencoder": 4,
        "decoder": 5,
        "denoiser": 6,
    }


def test_the_result_is_a_pipeline_that_draws(trained: SimpleNamespace) -> None:
    assert isinstance(trained.pipeline, Flux2KleinPipeline)
    (picture,) = draw(trained.pipeline, ["a red circle"], range(1))
    (again,) = draw(trained.pipeline, ["a red circle"], range(1))
    (other,) = draw(trained.pipeline, ["a red circle"], range(1, 2))
    assert picture.size == (64, 64)
    assert picture.tobytes() == again.tobytes() != other.tobytes()


def test_the_files_hold_the_precision_that_loads_together_and_anyone_may_read_them(
    trained: SimpleNamespace,
) -> None:
    precision = {}
    for path in trained.folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as weights:
            precision[path.parent.name] = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert precision["text_encoder"] == {"F32"}
    assert precision["transformer"] == {"BF16"}
    assert precision["vae"] <= {"BF16", "I64"}
    assert {path.stat().st_mode & 0o777 for path in trained.folder.rglob("*") if path.is_file()} == {0o644}


def test_every_word_is_one_token(trained: SimpleNamespace) -> None:
    ids, mask = tokenize(trained.pipeline.tokenizer, CAPTIONS)
    assert ids.shape == (3, 16)
    assert mask.sum(dim=1).tolist() == [2 + len(text.split()) for text in CAPTIONS]


# ---------------------------------------------------------------- what each stage learns


def test_autoencoder_and_decoder_each_get_closer_to_the_pictures() -> None:
    pool = pictures(4)
    wanted = pool / 127.5 - 1

    @torch.no_grad()
    def off() -> float:
        return picture_loss(autoencoder.decode(encode(autoencoder, pool)).sample, wanted, 2.0).item()

    with seeded(0):
        autoencoder = new_autoencoder()
        untrained = off()
        train_autoencoder(autoencoder, pool, AutoencoderSettings(short(AutoencoderSettings().schedule, 40)))
        trained = off()
        encoder = [weight.clone() for weight in autoencoder.encoder.parameters()]
        sharpen_decoder(autoencoder, pool, DecoderSettings(short(DecoderSettings().schedule, 30)))
        sharpened = off()
    assert untrained > 1.2 * trained
    assert trained > 1.05 * sharpened
    assert all(map(torch.equal, encoder, autoencoder.encoder.parameters()))


def test_the_denoiser_learns_to_tell_latents_from_noise() -> None:
    with seeded(0):
        tokenizer = train_tokenizer(TokenizerSettings(captions=200), Random(0))
        autoencoder = new_autoencoder()
        train_autoencoder(
            autoencoder, pictures(8), AutoencoderSettings(short(AutoencoderSettings().schedule, 1))
        )
        pairs = sample_pairs(autoencoder, tokenizer, 16, Random(0))
        transformer, text_encoder = new_transformer(), new_text_encoder(tokenizer, len(tokenizer))

    @torch.no_grad()
    def off() -> float:
        with seeded(1):
            prompt = embed(text_encoder, pairs.ids, pairs.mask)
            return denoising_loss(transformer, pairs.latents, prompt, torch.linspace(0, 1, 16)).item()

    # The output starts at zero, so the loss is the variance of noise plus that of normalised latents: 1 + 1.
    assert off() == pytest.approx(2.0, abs=0.3)
    with seeded(2):
        train_denoiser(
            transformer, text_encoder, pairs, DenoiserSettings(short(DenoiserSettings().schedule, 40))
        )
    assert off() < 1.6


# ---------------------------------------------------------------- training sees what the pipeline sees


def test_prompts_are_embedded_as_the_pipeline_embeds_them(trained: SimpleNamespace) -> None:
    pipeline = trained.pipeline
    with torch.no_grad():
        ours = embed(pipeline.text_encoder, *tokenize(pipeline.tokenizer, CAPTIONS))
        theirs, _ = pipeline.encode_prompt(
            CAPTIONS, max_sequence_length=16, text_encoder_out_layers=TEXT_LAYERS
        )
    torch.testing.assert_close(ours, theirs)


def test_the_pipeline_decodes_the_tokens_of_a_picture_back_into_its_latents(trained: SimpleNamespace) -> None:
    vae = trained.pipeline.vae
    latents = encode(vae, pictures(2))
    tokens = to_tokens(vae, latents)
    positions = Flux2KleinPipeline._prepare_latent_ids(torch.empty(2, 16, 8, 8))
    patches = torch.stack(list(Flux2KleinPipeline._unpack_latents_with_ids(tokens, positions)))
    scale = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    restored = Flux2KleinPipeline._unpatchify_latents(patches * scale + vae.bn.running_mean.view(1, -1, 1, 1))
    torch.testing.assert_close(restored, latents)


# ---------------------------------------------------------------- the loop


def test_fit_finds_the_minimum_and_keeps_the_average() -> None:
    weight = torch.nn.Parameter(torch.tensor([4.0, -4.0]))
    goal = torch.tensor([1.0, 2.0])
    schedule = Schedule(200, 1, warm_up=5, final_rate=0.0, averaging=0.9, averaging_warm_up=10)
    optimizer = torch.optim.AdamW([weight], lr=0.2, weight_decay=0.0)
    losses = fit("goal", lambda: (weight - goal).square().sum(), [weight], [optimizer], schedule)
    assert losses[0] == pytest.approx(45.0)
    assert losses[-1] < 1e-3
    torch.testing.assert_close(weight.detach(), goal, atol=0.05, rtol=0)


def test_the_rate_rises_then_falls_to_its_end() -> None:
    schedule = Schedule(100, 1, warm_up=10, final_rate=0.02, averaging=0.99, averaging_warm_up=10)
    rates = [schedule.rate(step) for step in range(101)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[9] == max(rates) == pytest.approx(1.0, abs=0.03)
    assert rates[100] == pytest.approx(0.02)
    assert schedule.memory(0) < 0.2 < schedule.memory(10_000) == 0.99


def test_a_recipe_can_be_shortened_and_lengthened() -> None:
    whole = Recipe()
    tenth, triple = whole.scaled(steps=0.1, data=0.1), whole.scaled(steps=3)
    assert (tenth.denoiser.schedule.steps, tenth.denoiser.schedule.warm_up, tenth.denoiser.pairs) == (
        300,
        6,
        3200,
    )
    assert (triple.denoiser.schedule.steps, triple.denoiser.schedule.warm_up) == (9000, 60)
    assert whole.scaled() == whole


@pytest.mark.parametrize("other_seed", [7, 8])
def test_the_seed_alone_decides_the_weights(other_seed: int) -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        settings = AutoencoderSettings(short(AutoencoderSettings().schedule, 2))
        with seeded(seed):
            autoencoder = new_autoencoder()
            train_autoencoder(autoencoder, pictures(8), settings)
        return [parameter.detach() for parameter in autoencoder.parameters()]

    same = all(map(torch.equal, weights(7), weights(other_seed)))
    assert same is (other_seed == 7)


def test_seeding_leaves_the_numbers_outside_alone() -> None:
    before = torch.random.get_rng_state()
    with seeded(3):
        inside = torch.rand(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    with seeded(3):
        assert torch.equal(torch.rand(1), inside)


def test_a_fault_at_an_edge_costs_more_than_one_on_a_plain_ground() -> None:
    wanted = torch.full((1, 3, 32, 32), -1.0)
    wanted[..., 16:] = 1.0
    at_edge, far_off = wanted.clone(), wanted.clone()
    at_edge[..., 15] = 0.0
    far_off[..., 3] = 0.0
    assert picture_loss(wanted, wanted, 2.0) == 0
    assert picture_loss(at_edge, wanted, 2.0) == pytest.approx(3 * picture_loss(far_off, wanted, 2.0).item())


# ---------------------------------------------------------------- the command


def test_the_command_trains_a_model_and_judges_it(tmp_path: Path) -> None:
    options = ["--steps-scale", "0.001", "--data-scale", "0.001", "--judge", "2"]
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "model"), *options])
    assert result.exit_code == 0, result.output
    assert "denoiser: step 3 of 3, loss " in result.output
    assert "of 2 pictures judged right" in result.output
    assert (tmp_path / "model" / "model_index.json").is_file()


def test_the_command_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    result = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
