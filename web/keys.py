"""The API keys of this deployment."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from pathlib import Path

from omniqueue import errors, settings


class Unauthorized(errors.InvalidRequest):
    """A valid API key is needed: send it as Authorization: Bearer KEY."""

    status = 401
    code = "invalid_api_key"


class Keys:
    """Keys as digests: comparing those takes the same time whatever was sent, and tells nothing of a key's length."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = tuple(_digest(key) for key in dict.fromkeys(keys))

    @classmethod
    def load(cls, config: settings.Settings) -> Keys:
        """The keys of the environment and of the key file. Raises ConfigError, since no key would mean no lock."""
        if config.api_keys_file is None:
            return cls(config.api_keys)
        try:
            lines = Path(config.api_keys_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise errors.ConfigError(f"OMNIQUEUE_API_KEYS_FILE cannot be read: {exc}.") from exc
        found = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        if not found:
            raise errors.ConfigError(f"OMNIQUEUE_API_KEYS_FILE={config.api_keys_file!r} holds no key.")
        return cls((*config.api_keys, *found))

    def __bool__(self) -> bool:
        """False when everybody is let in."""
        return bool(self._digests)

    def holder(self, authorization: str | None) -> str:
        """A short name of the key in an Authorization header, for counting. Raises Unauthorized.

        ``Bearer KEY`` as API clients send it, or ``Basic`` with the key as password, which browsers do by themselves.
        """
        given = _digest(_key(authorization or ""))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]  # all of them, whichever it is
        if not any(matches):
            raise Unauthorized()
        return given.hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key(authorization: str) -> str:
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""
