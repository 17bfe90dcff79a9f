"""How ranks know each other's words: by a secret that the launcher gives to them alone. Needs no torch."""

from __future__ import annotations

import hashlib
import hmac

SECRET = "SHARDWISE_SECRET"
"""The variable by which the launcher hands the ranks their secret. It is no argument: those can be read by anybody."""

_LENGTH = 2 * hashlib.sha256().digest_size


def sealed(key: str, text: str, secret: bytes) -> str:
    """Return a text with its seal in front, which is of this key alone; without a secret, the text."""
    return _seal(key, text, secret) + text


def opened(key: str, word: str, secret: bytes) -> str | None:
    """Return the text of a word that was sealed for this key; None if it was not, or with another secret."""
    length = _LENGTH if secret else 0
    seal, text = word[:length], word[length:]
    return text if hmac.compare_digest(seal.encode(), _seal(key, text, secret).encode()) else None


def _seal(key: str, text: str, secret: bytes) -> str:
    return hmac.new(secret, f"{key}\n{text}".encode(), hashlib.sha256).hexdigest() if secret else ""
