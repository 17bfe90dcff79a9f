"""The synthetic world the demo model was trained on: captions, pictures that show them, and a judge.

A `Scene` says what a picture must show. `caption` puts it into words, `parse_caption` reads such words back,
`render` draws it, and `judge` looks at any picture and says whether it shows the scene:

    scene = parse_caption("a red circle beside a blue square on a white background")
    assert judge(render(scene, Random(0)), scene).right

Owns the palette, the shapes, the grammar and the mix of scenes; the shipped weights know no other world.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Kind: TypeAlias = Literal["single", "beside", "above", "pair"]
Point: TypeAlias = tuple[float, float]

SIDE = 64
"""Width and height of every picture, in pixels."""

PALETTE: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "red": (220, 40, 45),
        "green": (45, 165, 70),
        "blue": (45, 85, 220),
        "yellow": (248, 216, 60),
        "orange": (242, 135, 35),
        "purple": (140, 65, 185),
        "black": (24, 24, 28),
        "white": (246, 246, 244),
    }
)
"""The colours that have a name, as RGB."""

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
"""The shapes that have a name."""

POSITIONS: Mapping[str, Point] = MappingProxyType(
    {
        "on the left": (0.27, 0.5),
        "on the right": (0.73, 0.5),
        "at the top": (0.5, 0.27),
        "at the bottom": (0.5, 0.73),
        "in the centre": (0.5, 0.5),
    }
)
"""Where a single figure can be said to be, and its centre then as fractions of the side."""

SIZES: Mapping[str, tuple[float, float]] = MappingProxyType({"small": (0.15, 0.17), "large": (0.30, 0.34)})
"""How big a single figure can be said to be, and the range of its radius then as fractions of the side."""

_UNSAID_SIZE = (0.21, 0.25)
_SHARED_SIZE = (0.17, 0.20)
_KINDS: Mapping[Kind, float] = MappingProxyType({"single": 0.55, "beside": 0.18, "above": 0.12, "pair": 0.15})
_SUPERSAMPLING = 4
_TEMPLATE_SIDE = 32
_FEWEST_PIXELS = 12  # fewer than this are noise, not a figure
_LEAST_IOU = 0.5  # blobs stay below it; every shape that the demo model draws well is above 0.7


@dataclass(frozen=True)
class Figure:
    """One coloured shape."""

    colour: str
    shape: str

    def __post_init__(self) -> None:
        _require("colour", self.colour, PALETTE)
        _require("shape", self.shape, SHAPES)

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """What a picture must show: one or two figures on a background of another colour.

    In a `"beside"` scene the first figure is the left one, in an `"above"` scene the upper one; a `"pair"` is
    the same figure twice, side by side. Only a `"single"` figure can have a `size` and a `position` (None: the
    caption does not say), and only its background can go unsaid: then it is white, or black under white.
    """

    kind: Kind
    background: str
    figures: tuple[Figure, ...]
    size: str | None = None
    position: str | None = None
    names_background: bool = True

    def __post_init__(self) -> None:
        _require("colour", self.background, PALETTE)
        _require("size", self.size, (None, *SIZES))
        _require("position", self.position, (None, *POSITIONS))
        count = 1 if self.kind == "single" else 2
        if len(self.figures) != count:
            raise ValueError(f"a scene of kind {self.kind!r} has {count} figures, not {len(self.figures)}")
        if self.kind == "pair" and self.figures[0] != self.figures[1]:
            raise ValueError(f"a pair is one figure twice, not a {self.figures[0]} and a {self.figures[1]}")
        if self.kind != "single" and (self.size or self.position or not self.names_background):
            raise ValueError("only a single figure has a size, a position or an unsaid background")
        if not self.names_background and self.background != _unsaid_background(self.figures[0]):
            raise ValueError(f"the background cannot go unsaid where it is {self.background}")
        if any(figure.colour == self.background for figure in self.figures):
            raise ValueError(f"a {self.background} figure cannot be seen on a {self.background} background")


def _require(what: str, name: str | None, names: Collection[str | None]) -> None:
    if name not in names:
        raise ValueError(f"no {what} is called {name!r}; there are {', '.join(filter(None, names))}")


def _unsaid_background(figure: Figure) -> str:
    return "black" if figure.colour == "white" else "white"


def sample_scene(rng: Random, kind: Kind | None = None) -> Scene:
    """Make up a scene, of any kind or of the given one, in the shares that the demo model was trained on."""
    kind = kind or rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    background = rng.choice(list(PALETTE))
    first = _sample_figure(rng, background)
    if kind != "single":
        second = first if kind == "pair" else _sample_figure(rng, background)
        return Scene(kind, background, (first, second))
    size = rng.choice([*SIZES, None, None])
    position = rng.choice(list(POSITIONS)) if rng.random() < 0.4 else None
    if rng.random() >= 0.15:
        return Scene(kind, background, (first,), size, position)
    return Scene(kind, _unsaid_background(first), (first,), size, position, names_background=False)


def _sample_figure(rng: Random, background: str) -> Figure:
    colour = rng.choice([name for name in PALETTE if name != background])
    return Figure(colour, rng.choice(SHAPES))


def caption(scene: Scene) -> str:
    """Put a scene into the words that the demo model understands."""
    first, last = scene.figures[0], scene.figures[-1]
    if scene.kind == "pair":
        text = f"two {first.colour} {_plural(first.shape)}"
    elif scene.kind == "single":
        text = _with_article(f"{scene.size} {first}" if scene.size else f"{first}")
        text += f" {scene.position}" if scene.position else ""
    else:
        text = f"{_with_article(f'{first}')} {scene.kind} {_with_article(f'{last}')}"
    return f"{text} on {_with_article(scene.background)} background" if scene.names_background else text


def _with_article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def _plural(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


class _Words:
    """The words of a caption that are still to be read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.left = text.split()

    def sees(self, *options: str) -> bool:
        return bool(self.left) and self.left[0] in options

    def take(self, *options: str) -> str:
        if self.sees(*options):
            return self.left.pop(0)
        raise self.misfit(f"expected {' or '.join(map(repr, options))}")

    def misfit(self, reason: str) -> ValueError:
        if self.left:
            return ValueError(f"cannot understand {self.left[0]!r} in {self._text!r}: {reason}")
        return ValueError(f"{self._text!r} ends too early: {reason}")


def parse_caption(text: str) -> Scene:
    """Read a caption back into the scene it describes; a ValueError names the word that makes no sense.

    Reads every caption that `caption` writes, and "a" for "an". Case matters, as it does to the model.
    """
    words = _Words(text)
    if words.take("a", "an", "two") == "two":
        figure = _read_figure(words, plural=True)
        return Scene("pair", _read_background(words), (figure, figure))
    size = words.take(*SIZES) if words.sees(*SIZES) else None
    figure = _read_figure(words)
    if size is None and words.sees("beside", "above"):
        kind: Kind = "beside" if words.take("beside", "above") == "beside" else "above"
        words.take("a", "an")
        second = _read_figure(words)
        return Scene(kind, _read_background(words), (figure, second))
    position = _read_position(words)
    if words.left:
        return Scene("single", _read_background(words), (figure,), size, position)
    return Scene("single", _unsaid_background(figure), (figure,), size, position, names_background=False)


def _read_figure(words: _Words, *, plural: bool = False) -> Figure:
    colour = words.take(*PALETTE)
    shapes = {_plural(shape) if plural else shape: shape for shape in SHAPES}
    return Figure(colour, shapes[words.take(*shapes)])


def _read_position(words: _Words) -> str | None:
    if words.left[1:2] != ["the"]:
        return None
    preposition = words.take(*dict.fromkeys(position.split()[0] for position in POSITIONS))
    words.take("the")
    places = {position.split()[-1]: position for position in POSITIONS if position.startswith(preposition)}
    return places[words.take(*places)]


def _read_background(words: _Words) -> str:
    words.take("on")
    words.take("a", "an")
    colour = words.take(*PALETTE)
    words.take("background")
    if words.left:
        raise words.misfit("expected the end")
    return colour


def render(scene: Scene, rng: Random) -> Image.Image:
    """Draw a scene as a picture of 64 x 64 pixels; `rng` decides all that the scene leaves open."""
    places, radii, jitter = _layout(scene)
    radius = rng.uniform(*radii)
    low, high = radius + 0.02, 1 - radius - 0.02
    placed = []
    for figure, place in zip(scene.figures, places, strict=True):
        x, y = (min(max(middle, low), high) + rng.uniform(-jitter, jitter) for middle in POSITIONS[place])
        placed.append(_Placed(figure, (x, y), radius))
    return _draw(scene.background, placed)


def _layout(scene: Scene) -> tuple[tuple[str, ...], tuple[float, float], float]:
    """Where the figures go, the range of their radius, and how far off its place each may be."""
    if scene.kind != "single":
        places = ("at the top", "at the bottom") if scene.kind == "above" else ("on the left", "on the right")
        return places, _SHARED_SIZE, 0.02
    radii = SIZES[scene.size] if scene.size else _UNSAID_SIZE
    return (scene.position or "in the centre",), radii, 0.02 if scene.position else 0.05


class _Placed(NamedTuple):
    """A figure with its centre and half its extent, as fractions of the side."""

    figure: Figure
    centre: Point
    radius: float


def _draw(background: str, placed: Collection[_Placed]) -> Image.Image:
    side = SIDE * _SUPERSAMPLING
    image = Image.new("RGB", (side, side), PALETTE[background])
    canvas = ImageDraw.Draw(image)
    for figure, (x, y), radius in placed:
        outline = [(side * (x + radius * u), side * (y + radius * v)) for u, v in _outline(figure.shape)]
        paint = canvas.ellipse if figure.shape == "circle" else canvas.polygon
        paint(outline, fill=PALETTE[figure.colour])
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


@cache
def _outline(shape: str) -> tuple[Point, ...]:
    """The corners of a shape (of a circle: of its box) around the origin, of radius 1, with y pointing down."""
    if shape == "circle":
        return (-1.0, -1.0), (1.0, 1.0)
    if shape == "square":
        return (-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)
    if shape == "triangle":
        return (0.0, -1.0), (1.0, 0.82), (-1.0, 0.82)
    if shape == "cross":
        arm = ((-0.34, -1.0), (0.34, -1.0), (0.34, -0.34))
        turns = ((1, 0), (0, 1), (-1, 0), (0, -1))
        return tuple((cos * x - sin * y, sin * x + cos * y) for cos, sin in turns for x, y in arm)
    if shape == "star":
        tips = ((0.46 if tip % 2 else 1.08, math.pi * (tip / 5 - 0.5)) for tip in range(10))
        return tuple((radius * math.cos(angle), radius * math.sin(angle) + 0.05) for radius, angle in tips)
    return tuple(_heart_point(math.tau * step / 60) for step in range(60))


def _heart_point(angle: float) -> Point:
    x = 16 * math.sin(angle) ** 3
    y = 13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle) - math.cos(4 * angle)
    return x / 16.5, -(y + 2.5) / 16.5


@dataclass(frozen=True)
class Judgement:
    """What is right about a picture: the background, all the colours, all the shapes, the geometry.

    `geometry` is None unless the scene names a size or a position; `iou` is how well the shapes fit, up to 1.
    """

    background: bool
    colours: bool
    shapes: bool
    geometry: bool | None
    iou: float

    @property
    def right(self) -> bool:
        """Whether the background, every colour and every shape are as they should be."""
        return self.background and self.colours and self.shapes


@dataclass(frozen=True)
class _Sighting:
    """The figure seen in a part of a picture, and the box it fills there (None: there is no figure)."""

    colour: str | None = None
    shape: str | None = None
    iou: float = 0.0
    box: tuple[int, int, int, int] | None = None


def judge(image: Image.Image, scene: Scene) -> Judgement:
    """Look at a picture and say which parts of a scene it shows.

    Each pixel counts as the palette colour nearest to it. The background is what most of the border shows, a
    figure's colour is what most of the rest shows, and its shape is the one whose outline overlaps it best.
    """
    labels = _nearest_colours(image)
    border = np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]])
    background = int(np.bincount(border).argmax())
    parts = np.split(labels, len(scene.figures), axis=0 if scene.kind == "above" else 1)
    pairs = [(_look(part, background), figure) for part, figure in zip(parts, scene.figures, strict=True)]
    return Judgement(
        background=list(PALETTE)[background] == scene.background,
        colours=all(seen.colour == figure.colour for seen, figure in pairs),
        shapes=all(seen.shape == figure.shape for seen, figure in pairs),
        geometry=_fits(pairs[0][0], scene) if scene.size or scene.position else None,
        iou=sum(seen.iou for seen, _ in pairs) / len(pairs),
    )


def _nearest_colours(image: Image.Image) -> NDArray[np.intp]:
    """The index in the palette of the colour nearest to each pixel."""
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), dtype=np.int32)
    palette = np.array(list(PALETTE.values()), dtype=np.int32)
    distances = ((pixels[:, :, None] - palette) ** 2).sum(axis=-1)
    return np.asarray(distances.argmin(axis=-1))


def _look(labels: NDArray[np.intp], background: int) -> _Sighting:
    counts = np.bincount(labels.ravel(), minlength=len(PALETTE))
    counts[background] = 0
    colour = int(counts.argmax())
    if counts[colour] < _FEWEST_PIXELS:
        return _Sighting()
    mask = Image.fromarray((labels == colour).astype(np.uint8) * 255)
    seen = _normalised(mask)
    overlaps = {shape: (seen & _template(shape)).sum() / (seen | _template(shape)).sum() for shape in SHAPES}
    best = max(SHAPES, key=overlaps.__getitem__)
    shape = best if overlaps[best] >= _LEAST_IOU else None
    return _Sighting(list(PALETTE)[colour], shape, float(overlaps[best]), mask.getbbox())


@cache
def _template(shape: str) -> NDArray[np.bool_]:
    drawing = _draw("white", [_Placed(Figure("black", shape), (0.5, 0.5), 0.3)])
    return _normalised(drawing.convert("L").point(lambda value: 255 * (value < 128)))


def _normalised(mask: Image.Image) -> NDArray[np.bool_]:
    """What the mask covers, centred in a square around it and scaled to the size of the templates."""
    left, top, right, bottom = mask.getbbox() or (0, 0, *mask.size)
    side = max(right - left, bottom - top)
    x, y = left - (side - (right - left)) // 2, top - (side - (bottom - top)) // 2
    square = mask.crop((x, y, x + side, y + side))
    return np.asarray(square.resize((_TEMPLATE_SIDE, _TEMPLATE_SIDE), Image.Resampling.BILINEAR)) > 127


def _fits(seen: _Sighting, scene: Scene) -> bool:
    """Whether a single figure is as big, and where, as the scene says."""
    if seen.box is None:
        return False
    left, top, right, bottom = (edge / SIDE for edge in seen.box)
    extent = max(right - left, bottom - top)
    if (scene.size == "small" and extent >= 0.39) or (scene.size == "large" and extent <= 0.52):
        return False
    x, y = (left + right) / 2, (top + bottom) / 2
    wanted_x, wanted_y = POSITIONS[scene.position] if scene.position else (x, y)
    return max(abs(x - wanted_x), abs(y - wanted_y)) < 0.15
