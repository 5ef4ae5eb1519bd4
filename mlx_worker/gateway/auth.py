"""Who asks: the key of a request or of its session, what that may do, and signing in.

Owns the ways to show a key, permissions, and how often a wrong one may be tried. Leaves looking it
up to store.py, origins and names to security.py. Event loop.

A key travels in an Authorization header, or once in the body of a sign-in; then the console has a
cookie that its scripts can't read, that stands for 12 h and for that key alone.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from time import monotonic

from aiohttp import web

from mlx_worker.errors import NotPermitted, NotSignedIn, TooManyTries
from mlx_worker.gateway.records import Key, Permission
from mlx_worker.gateway.store import Store

COOKIE = "mlx_gateway_session"
SIGN_IN = "sign in, or send Authorization: Bearer KEY"


@dataclass(frozen=True)
class Caller:
    """The key that a request came with. token: its session's; None: it came as a bearer."""

    key: Key
    token: str | None = None

    @property
    def via_session(self) -> bool:
        return self.token is not None

    @property
    def actor(self) -> str:
        """As the audit names it."""
        return f"{self.key.name} ({self.key.id})"

    @property
    def organisation_id(self) -> str:
        """Raises NotPermitted for the platform's key, which is in none."""
        if self.key.organisation_id is None:
            raise NotPermitted(
                "a platform key is of no organisation", hint="use a key of the organisation"
            )
        return self.key.organisation_id

    def require(self, permission: Permission) -> str:
        """The organisation in which it may. Raises NotPermitted."""
        organisation_id = self.organisation_id
        if permission not in self.key.permissions:
            raise NotPermitted(
                f"the key {self.key.name} ({self.key.role}) lacks the permission {permission}",
                hint="an owner of the organisation can make one that has it",
            )
        return organisation_id

    def require_platform(self) -> None:
        """Raises NotPermitted for a key of an organisation, whatever its role."""
        if not self.key.is_platform:
            raise NotPermitted("this needs a platform key")


async def caller_of(request: web.Request, store: Store) -> Caller:
    """Raises NotSignedIn. Whoever sends a key as a bearer is asked for nothing else."""
    if "Authorization" in request.headers:
        key = await store.key_of(bearer(request))
        if key is None:
            raise NotSignedIn("the key is wrong, or was revoked", hint=SIGN_IN)
        return Caller(key)
    token = request.cookies.get(COOKIE)
    if token is None:
        raise NotSignedIn("the key is missing", hint=SIGN_IN)
    key = await store.key_of_session(token)
    if key is None:
        raise NotSignedIn("the session is over", hint="sign in again")
    return Caller(key, token)


def bearer(request: web.Request) -> str:
    """What is sent as a bearer, once; else a text that is no key."""
    values = request.headers.getall("Authorization", [])
    scheme, _, secret = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return secret.strip() if scheme.lower() == "bearer" else ""


# --- signing in --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoginLimits:
    """Wrong keys within window_s, after which no other may be tried until it has passed."""

    per_address: int = 10
    in_all: int = 200
    window_s: float = 300.0


USUAL_LIMITS = LoginLimits()


class Logins:
    """Counts the wrong keys that were tried, by address and in all; keeps no more than in_all."""

    def __init__(
        self, limits: LoginLimits = USUAL_LIMITS, now_s: Callable[[], float] = monotonic
    ) -> None:
        self._limits = limits
        self._now_s = now_s
        self._tries: deque[tuple[float, str]] = deque()  # the oldest first

    def begin(self, address: str) -> tuple[float, str]:
        """A try, which counts as a wrong one until it is forgiven. Raises TooManyTries."""
        now_s, limits, network = self._now_s(), self._limits, network_of(address)
        while self._tries and self._tries[0][0] <= now_s - limits.window_s:
            self._tries.popleft()
        mine = [at_s for at_s, one in self._tries if one == network]
        if len(mine) >= limits.per_address:
            raise TooManyTries(retry_after_s=mine[-limits.per_address] + limits.window_s - now_s)
        if len(self._tries) >= limits.in_all:
            first_s = self._tries[-limits.in_all][0]
            raise TooManyTries(retry_after_s=first_s + limits.window_s - now_s)
        begun = (now_s, network)
        self._tries.append(begun)
        return begun

    def forgive(self, begun: tuple[float, str]) -> None:
        """It was the right key."""
        if begun in self._tries:
            self._tries.remove(begun)


def network_of(address: str) -> str:
    """Of IPv6 the first half, as whoever has one address there has all."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(IPv6Address(int(found) >> 64 << 64))
