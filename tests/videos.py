"""Reading videos back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np


def frames_of(file: str | Path, height: int, width: int) -> np.ndarray:
    """Return the frames of a video of this size: (frames, height, width, 3), 0 to 255."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(file), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert f"{width}x{height}" in done.stderr.decode()
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)
