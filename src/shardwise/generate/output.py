"""Files with what was drawn: PNG that carries its parameters, MP4 with a JSON file of them beside it."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
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
    """Check that files can be written to a folder, which is made when the first is.

    Raises:
        OutputError: it is no folder, cannot be made, or nothing can be written there.
    """
    there = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise OutputError(f"{out} cannot be made: {there} is not a folder; choose another with --out")
    if not os.access(there, os.W_OK | os.X_OK):
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
    return _write(out, stem, {".png": lambda file: file.write_bytes(encoded.getbuffer())})


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
    text = json.dumps(parameters, indent=1, default=str) + "\n"
    return _write(
        out,
        stem,
        {
            ".mp4": lambda new: export_to_video(list(frames), str(new), fps=fps),
            ".json": lambda new: new.write_text(text, "utf-8"),
        },
    )


def _write(out: Path, stem: str, writers: Mapping[str, Callable[[Path], object]]) -> Path:
    """Write files of one name, by suffix, and return the first; none is overwritten, and none is seen half written.

    Others may write to the same folder at the same time, under the same name.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{stem}-", dir=out, ignore_cleanup_errors=True) as name:
            parts = {suffix: Path(name) / f"{stem}{suffix}" for suffix in writers}
            for suffix, write in writers.items():
                write(parts[suffix])
            for count in itertools.count(1):
                named = f"{stem}-{count}" if count > 1 else stem
                if _all_named(parts, {suffix: out / f"{named}{suffix}" for suffix in writers}):
                    return out / f"{named}{next(iter(writers))}"
    except OSError as error:
        raise OutputError(
            f"{out / stem}{next(iter(writers))} cannot be written: {error.strerror or error}"
        ) from error
    raise AssertionError("unreachable")


def _all_named(parts: Mapping[str, Path], names: Mapping[str, Path]) -> bool:
    """Give complete files their names, all of them or, if one is taken, none; return whether they have them."""
    given: list[Path] = []
    for suffix, name in names.items():
        if not _named(parts[suffix], name):
            for taken_back in given:
                taken_back.unlink()
            return False
        given.append(name)
    return True


def _named(part: Path, name: Path) -> bool:
    """Give a file a name that no file has, in one step; return False if one has it."""
    try:
        os.link(part, name)
    except FileExistsError:
        return False
    except OSError:  # a file system without links: the name is taken first, by an empty file
        try:
            name.touch(exist_ok=False)
        except FileExistsError:
            return False
        os.replace(part, name)
    return True
