"""Contact sheets: pictures in a grid, each over its caption."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

PICTURE = 192
"""Side of a picture on the sheet, in pixels."""
MARGIN = 12
CAPTION_LINES = 2
LINE_HEIGHT = 15
CAPTION_CHARACTERS = 30


def contact_sheet(pictures: Sequence[Image.Image], captions: Sequence[str], columns: int = 4) -> Image.Image:
    """Return one picture that shows all `pictures` with their `captions` below them."""
    rows = -(-len(pictures) // columns)
    width, height = PICTURE + MARGIN, PICTURE + CAPTION_LINES * LINE_HEIGHT + MARGIN
    sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=12)
    for i, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = MARGIN + i % columns * width, MARGIN + i // columns * height
        sheet.paste(picture.resize((PICTURE, PICTURE), Image.Resampling.NEAREST), (x, y))
        for line, text in enumerate(textwrap.wrap(caption, CAPTION_CHARACTERS)[:CAPTION_LINES]):
            draw.text((x, y + PICTURE + 1 + line * LINE_HEIGHT), text, fill=(40, 40, 40), font=font)
    return sheet
