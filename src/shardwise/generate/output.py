"""Files with what was drawn: PNG that carries its parameters, MP4 with a JSON file of them beside it."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diffusers.utils import export_to_video
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from shardwise.errors import OutputError


def require_video_writer() -> None:
    """Check that videos can be written here.

    Raises:
        OutputError: what diffusers writes them with is not installed.
    """
    missing = [name for name in ("imageio", "imageio_ffmpeg") if find_spec(name) is None]
    if missing:
        raise OutputError(
            f"videos are written with {' and '.join(missing)}, which is not installed: pip install 'shardwise[video]'"
        )


def require_folder(out: Path) -> None:
    """Make the folder for the files, if there is none.

    Raises:
        OutputError: nothing can be written there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out} cannot be made: {error.strerror}") from error
    if not os.access(out, os.W_OK):
        raise OutputError(f"{out} cannot be written to: choose another folder with --out")


def write_png(picture: Image.Image, out: Path, stem: str, parameters: Mapping[str, Any]) -> Path:
    """Write a picture with its parameters, as JSON in the text `parameters`; return the file, which is a new one.

    Raises:
        OutputError: there is no room, or no permission.
    """
    text = PngInfo()
    text.add_text("Software", f"shardwise {parameters['shardwise']}")
    text.add_text("Description", str(parameters["prompt"]))
    text.add_text("parameters", json.dumps(parameters, default=str))
    encoded = io.BytesIO()
    picture.save(encoded, "PNG", pnginfo=text)
    return _write(_free(out, stem, ".png"), lambda file: file.write_bytes(encoded.getbuffer()))


def write_mp4(frames: Sequence[Any], out: Path, stem: str, parameters: Mapping[str, Any], fps: int) -> Path:
    """Write a video, and its parameters in a JSON file of the same name; return the video's file, a new one.

    Args:
        frames: Pictures, or arrays of (height, width, 3) from 0 to 1.
        out: The folder.
        stem: Of the file's name.
        parameters: What the video was drawn with.
        fps: Frames per second.

    Raises:
        OutputError: there is no room, or no permission.
    """
    file = _free(out, stem, ".mp4")
    text = json.dumps(parameters, indent=1, default=str) + "\n"
    _write(file.with_suffix(".json"), lambda new: new.write_text(text, "utf-8"))
    return _write(file, lambda new: export_to_video(list(frames), str(new), fps=fps))


def _free(out: Path, stem: str, suffix: str) -> Path:
    """Return a name that no file has: nothing is overwritten."""
    file, count = out / f"{stem}{suffix}", 1
    while file.exists():
        count += 1
        file = out / f"{stem}-{count}{suffix}"
    return file


def _write(file: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` write to a file of another name, and give it its own once it is complete."""
    new = file.with_name(f".{file.stem}.part{file.suffix}")
    try:
        write(new)
        os.replace(new, file)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise OutputError(f"{file} cannot be written: {error.strerror or error}") from error
    return file
