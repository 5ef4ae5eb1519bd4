"""What keys look like, how one is made, and what is kept of it. Pure; any thread.

    mwk_…   an API key of an organisation
    mwp_…   a key of the platform
    mww_…   a worker's key, with the worker's id in it

Each is 256 random bits, so that a plain digest tells nothing of it and can be looked up.
"""

import re
import secrets
from hashlib import sha256

API, PLATFORM_KEY, WORKER = "mwk_", "mwp_", "mww_"
HINT_CHARS = 8  # of a key, that tell it from others
_RANDOM = "[A-Za-z0-9_-]{43}"
_KEY = re.compile(f"(?:mwk_|mwp_){_RANDOM}", re.ASCII)
_WORKER_KEY = re.compile(f"mww_[0-9a-f]{{16}}_{_RANDOM}", re.ASCII)


def new_id() -> str:
    return secrets.token_hex(8)


def new_key(*, is_platform: bool) -> str:
    return f"{PLATFORM_KEY if is_platform else API}{secrets.token_urlsafe(32)}"


def new_worker_key(worker_id: str) -> str:
    return f"{WORKER}{worker_id}_{secrets.token_urlsafe(32)}"


def new_token() -> str:
    """What a session's cookie holds: 256 random bits."""
    return secrets.token_urlsafe(32)


def is_key(text: str) -> bool:
    """Whether it has the form of an API key or a platform key."""
    return _KEY.fullmatch(text) is not None


def is_worker_key(text: str) -> bool:
    return _WORKER_KEY.fullmatch(text) is not None


def digest(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def hint(secret: str) -> str:
    return secret[:HINT_CHARS]
