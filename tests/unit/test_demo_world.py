"""The demo world: captions that can be read back, pictures that show them, and a judge that notices faults."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from PIL import Image

from shardwise.demo.world import (
    PALETTE,
    POSITIONS,
    SHAPES,
    Figure,
    Judgement,
    Scene,
    caption,
    judge,
    parse_caption,
    render,
    sample_scene,
)

RED_CIRCLE = Figure("red", "circle")
BLUE_STAR = Figure("blue", "star")
SINGLE = Scene("single", "white", (RED_CIRCLE,))
BESIDE = Scene("beside", "white", (RED_CIRCLE, BLUE_STAR))
ABOVE = Scene("above", "white", (RED_CIRCLE, BLUE_STAR))
PAIR = Scene("pair", "white", (BLUE_STAR, BLUE_STAR))


def scenes(count: int, seed: int = 11) -> list[Scene]:
    rng = Random(seed)
    return [sample_scene(rng) for _ in range(count)]


def verdict(shown: Scene, wanted: Scene) -> Judgement:
    """What the judge says of a picture that shows one scene where another was wanted."""
    return judge(render(shown, Random(5)), wanted)


# ---------------------------------------------------------------- captions


@pytest.mark.parametrize(
    ("scene", "text"),
    [
        (SINGLE, "a red circle on a white background"),
        (replace(SINGLE, names_background=False), "a red circle"),
        (replace(SINGLE, background="orange", size="small"), "a small red circle on an orange background"),
        (
            Scene("single", "black", (Figure("orange", "cross"),), size="large", position="in the centre"),
            "a large orange cross in the centre on a black background",
        ),
        (Scene("single", "black", (Figure("white", "heart"),), names_background=False), "a white heart"),
        (BESIDE, "a red circle beside a blue star on a white background"),
        (
            Scene("above", "white", (BLUE_STAR, Figure("orange", "cross"))),
            "a blue star above an orange cross on a white background",
        ),
        (PAIR, "two blue stars on a white background"),
        (
            Scene("pair", "red", (Figure("green", "cross"),) * 2),
            "two green crosses on a red background",
        ),
    ],
)
def test_a_scene_has_one_caption_that_reads_back(scene: Scene, text: str) -> None:
    assert caption(scene) == text
    assert parse_caption(text) == scene


def test_sampled_captions_read_back() -> None:
    sampled = scenes(600)
    assert [parse_caption(caption(scene)) for scene in sampled] == sampled
    assert {scene.kind for scene in sampled} == {"single", "beside", "above", "pair"}
    assert {scene.position for scene in sampled} == {None, *POSITIONS}
    assert {scene.names_background for scene in sampled} == {True, False}


def test_sampling_keeps_the_shares_the_weights_were_trained_on() -> None:
    sampled = scenes(4000)
    singles = [scene for scene in sampled if scene.kind == "single"]
    assert len(singles) / len(sampled) == pytest.approx(0.55, abs=0.03)
    assert sum(scene.position is not None for scene in singles) / len(singles) == pytest.approx(0.4, abs=0.03)
    assert sum(not scene.names_background for scene in singles) / len(singles) == pytest.approx(
        0.15, abs=0.03
    )


def test_a_kind_can_be_asked_for() -> None:
    rng = Random(0)
    assert {sample_scene(rng, "above").kind for _ in range(50)} == {"above"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a red pentagon on a white background", "pentagon"),
        ("a pink circle", "pink"),
        ("three red circles on a white background", "three"),
        ("two red circle on a white background", "circle"),
        ("a huge red circle", "huge"),
        ("a red circle on the moon", "moon"),
        ("a red circle under the table", "under"),
        ("a red circle behind a blue star on a white background", "behind"),
        ("a red circle beside a grey star on a white background", "grey"),
        ("a small red circle beside a blue star on a white background", "beside"),
        ("a red circle on a white canvas", "canvas"),
        ("a red circle on a white background please", "please"),
        ("A red circle", "A"),
    ],
)
def test_a_caption_that_makes_no_sense_names_the_word(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=f"cannot understand '{word}' in "):
        parse_caption(text)


@pytest.mark.parametrize("text", ["", "a", "a red", "two red circles", "a red circle beside a blue star on"])
def test_a_caption_that_ends_too_early_says_so(text: str) -> None:
    with pytest.raises(ValueError, match="ends too early: expected '"):
        parse_caption(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Figure("pink", "circle"), "no colour is called 'pink'"),
        (lambda: Figure("red", "blob"), "no shape is called 'blob'"),
        (lambda: replace(SINGLE, background="grey"), "no colour is called 'grey'"),
        (lambda: replace(SINGLE, size="huge"), "no size is called 'huge'; there are small, large"),
        (lambda: replace(SINGLE, position="above"), "no position is called 'above'"),
        (lambda: replace(SINGLE, background="red"), "a red figure cannot be seen on a red background"),
        (lambda: replace(SINGLE, figures=(RED_CIRCLE, BLUE_STAR)), "has 1 figures, not 2"),
        (lambda: replace(PAIR, figures=(RED_CIRCLE, BLUE_STAR)), "a pair is one figure twice"),
        (lambda: replace(BESIDE, size="small"), "only a single figure has a size"),
        (lambda: replace(SINGLE, background="green", names_background=False), "cannot go unsaid"),
    ],
)
def test_a_scene_that_no_picture_can_show_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------- pictures


def test_a_picture_is_the_same_for_the_same_seed_and_varies_with_it() -> None:
    first, again, other = (render(SINGLE, Random(seed)) for seed in (1, 1, 2))
    assert first.size == (64, 64)
    assert first.mode == "RGB"
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_pictures_are_judged_right_for_the_scene_they_show() -> None:
    rng = Random(3)
    sampled = [sample_scene(rng) for _ in range(300)]
    verdicts = [judge(render(scene, rng), scene) for scene in sampled]
    assert all(verdict.right for verdict in verdicts)
    assert all(verdict.geometry is not False for verdict in verdicts)
    assert min(verdict.iou for verdict in verdicts) > 0.7


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", ["small", "large"])
def test_every_shape_is_told_apart_from_every_other(shape: str, size: str) -> None:
    shown = Scene("single", "black", (Figure("yellow", shape),), size)
    assert verdict(shown, shown).right
    for other in set(SHAPES) - {shape}:
        assert not verdict(shown, replace(shown, figures=(Figure("yellow", other),))).shapes


@pytest.mark.parametrize("colour", PALETTE)
def test_every_colour_is_told_apart_from_every_other(colour: str) -> None:
    background = "black" if colour == "white" else "white"
    shown = Scene("single", background, (Figure(colour, "square"),))
    assert verdict(shown, shown).right
    for other in set(PALETTE) - {colour, background}:
        assert not verdict(shown, replace(shown, figures=(Figure(other, "square"),))).colours


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("wanted", [SINGLE, BESIDE, ABOVE, PAIR], ids=lambda scene: scene.kind)
def test_the_judge_notices_a_wrong_background(wanted: Scene) -> None:
    seen = verdict(replace(wanted, background="green"), wanted)
    assert (seen.background, seen.colours, seen.shapes, seen.right) == (False, True, True, False)


@pytest.mark.parametrize("wanted", [BESIDE, ABOVE], ids=lambda scene: scene.kind)
@pytest.mark.parametrize("place", [0, 1])
def test_the_judge_notices_one_wrong_colour_or_shape_of_two(wanted: Scene, place: int) -> None:
    def put(figure: Figure) -> Scene:
        figures = list(wanted.figures)
        figures[place] = figure
        return replace(wanted, figures=tuple(figures))

    recoloured = verdict(put(replace(wanted.figures[place], colour="purple")), wanted)
    assert (recoloured.background, recoloured.colours, recoloured.shapes) == (True, False, True)
    assert not recoloured.right
    reshaped = verdict(put(replace(wanted.figures[place], shape="triangle")), wanted)
    assert (reshaped.background, reshaped.colours, reshaped.shapes) == (True, True, False)
    assert not reshaped.right


@pytest.mark.parametrize("wanted", [BESIDE, ABOVE], ids=lambda scene: scene.kind)
def test_the_judge_notices_swapped_figures(wanted: Scene) -> None:
    swapped = verdict(replace(wanted, figures=wanted.figures[::-1]), wanted)
    assert (swapped.background, swapped.colours, swapped.shapes) == (True, False, False)


def test_the_judge_notices_a_missing_figure() -> None:
    lonely = replace(SINGLE, figures=(BLUE_STAR,), position="on the left")
    assert not verdict(lonely, PAIR).right


@pytest.mark.parametrize("position", POSITIONS)
def test_the_judge_notices_a_wrong_position(position: str) -> None:
    shown = replace(SINGLE, position=position)
    assert verdict(shown, shown).geometry is True
    for other in set(POSITIONS) - {position}:
        seen = verdict(shown, replace(shown, position=other))
        assert seen.geometry is False
        assert seen.right, "a wrong place is a matter of geometry alone"


@pytest.mark.parametrize(
    ("shown", "wanted"), [("small", "large"), ("large", "small"), (None, "small"), (None, "large")]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_judge_notices_a_wrong_size(shape: str, shown: str | None, wanted: str) -> None:
    scene = Scene("single", "white", (Figure("red", shape),), shown)
    assert verdict(scene, replace(scene, size=wanted)).geometry is False


def test_geometry_does_not_apply_where_the_caption_says_nothing_of_it() -> None:
    for scene in (SINGLE, BESIDE, ABOVE, PAIR):
        assert verdict(scene, scene).geometry is None


def test_noise_and_an_empty_picture_show_nothing() -> None:
    numbers = np.random.default_rng(0)
    empty = Image.new("RGB", (64, 64), PALETTE["white"])
    for wanted in scenes(100):
        coarse = Image.fromarray(numbers.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        assert not judge(coarse.resize((64, 64)), wanted).shapes
        seen = judge(empty, wanted)
        assert (seen.colours, seen.shapes, seen.iou) == (False, False, 0.0)
        assert seen.geometry is (False if wanted.size or wanted.position else None)


def test_a_picture_of_another_size_and_mode_can_be_judged() -> None:
    picture = render(BESIDE, Random(1)).resize((200, 200)).convert("RGBA")
    assert judge(picture, BESIDE).right
