"""What the local hub does wrong on demand: which fault meets which request, and how often.

Faults are added by the test's thread and taken by the hub's, so the list has a lock. How a fault
looks on the wire is hub.py's and hub_bodies.py's business.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal[
    "status", "drop", "refuse", "cut", "reset", "stall", "slow", "flip", "short", "ignore_range"
]
Place = Literal["resolve", "cdn", "api"]
ANSWER_KINDS = ("status", "drop", "refuse")  # instead of the answer
BODY_KINDS = ("cut", "reset", "stall", "slow", "flip", "short", "ignore_range")
NEEDS: dict[str, str] = {
    "status": "status",
    "cut": "after_bytes",
    "reset": "after_bytes",
    "stall": "after_bytes",
    "slow": "bytes_per_s",
    "flip": "offset",
    "short": "n_bytes",
}


class Gate:
    """Where a body stops: `reached` is set there, and it goes on after release()."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._lock = threading.Lock()
        self._released = False
        self._waiting: list[Callable[[], None]] = []

    def release(self) -> None:
        """Let this body go on, and all later ones; a second call changes nothing."""
        with self._lock:
            self._released = True
            waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    async def wait(self) -> None:
        """On the hub's loop: until release()."""
        loop, released = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the hub was stopped: its loop is closed
                loop.call_soon_threadsafe(released.set)

        self.reached.set()
        with self._lock:
            if self._released:
                return
            self._waiting.append(wake)
        await released.wait()


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    kind         status        answers `status`, with Retry-After where retry_after_s is given
                 drop          closes the connection without an answer
                 refuse        redirects to an address where nobody listens (LFS files only)
                 cut           closes after after_bytes of the body; Content-Length is the whole's
                 reset         as cut, by a TCP reset; bytes that the client has not read may go
                 stall         stops after after_bytes until gate.release()
                 slow          sends bytes_per_s
                 flip          inverts the byte at offset of the file
                 short         leaves out the last n_bytes of the file, in Content-Length too
                 ignore_range  answers 200 with the whole file where a range was asked for
    match        pattern of the file's name; for place "api", of what follows the repository
    repo         None: any
    times        how many requests it meets; None: all
    place        None: resolve and cdn; "resolve": the hub's own answer, "cdn": where it redirects
    method       None: any
    """

    kind: Kind
    match: str = "*"
    repo: str | None = None
    times: int | None = 1
    place: Place | None = None
    method: str | None = "GET"
    status: int | None = None
    retry_after_s: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    after_bytes: int | None = None
    bytes_per_s: float | None = None
    offset: int | None = None
    n_bytes: int | None = None
    gate: Gate = field(default_factory=Gate)

    def check(self) -> None:
        """Raises ValueError for a fault that could never happen."""
        if self.kind not in ANSWER_KINDS + BODY_KINDS:
            raise ValueError(f"unknown kind of fault: {self.kind!r}")
        need = NEEDS.get(self.kind)
        value = getattr(self, need) if need else 0
        if value is None or value < 0 or (need in ("bytes_per_s", "n_bytes") and not value):
            raise ValueError(f"{self.kind} needs {need}, not {value}")
        if self.after_bytes is not None and need != "after_bytes":
            raise ValueError(f"{self.kind} stands at no byte: leave out after_bytes")
        if self.status is not None and not 400 <= self.status <= 599:
            raise ValueError(f"status is of an error, 400 to 599, not {self.status}")
        if self.times is not None and self.times < 1:
            raise ValueError(f"times is at least 1, not {self.times}")
        if self.place == "api" and self.kind not in ("status", "drop"):
            raise ValueError(f"{self.kind} is for files, not for the API")
        if self.kind in BODY_KINDS and self.method != "GET":
            raise ValueError(f"{self.kind} needs a body, so method is GET, not {self.method}")
        if self.kind == "refuse" and self.place == "cdn":
            raise ValueError("refuse is about where resolve redirects to: place is resolve or None")

    def meets(self, method: str, place: Place, repo: str | None, name: str) -> bool:
        return (
            self.method in (None, method)
            and (place in ("resolve", "cdn") if self.place is None else place == self.place)
            and self.repo in (None, repo)
            and fnmatchcase(name, self.match)
        )

    def fits(self, start: int, stop: int, asked: bool) -> bool:
        """Whether a body of the file's bytes start to stop, which were asked for, can show it."""
        if self.kind in ("cut", "reset", "stall"):
            assert self.after_bytes is not None
            return self.after_bytes < stop - start
        if self.kind == "flip":
            assert self.offset is not None
            return start <= self.offset < stop
        return asked if self.kind == "ignore_range" else True


class Faults:
    """The faults that wait for their requests, the first added first.

    names  a function: repository to the names of all its files, for every repository
    """

    def __init__(self, names: Callable[[], Mapping[str, Collection[str]]]) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._waiting: list[tuple[Fault, list[int | None]]] = []  # with the times left

    def add(self, fault: Fault) -> Fault:
        """From now on the fault meets requests; returns it, for its gate.

        Raises ValueError for an unknown repository, and a pattern that matches none of its files.
        """
        fault.check()
        names = self._names()
        if fault.repo is not None and fault.repo not in names:
            raise ValueError(f"unknown repository {fault.repo!r}; there are {sorted(names)}")
        known = {n for repo, ns in names.items() if fault.repo in (None, repo) for n in ns}
        if fault.place != "api" and not any(fnmatchcase(n, fault.match) for n in known):
            raise ValueError(f"match: {fault.match!r} matches none of {sorted(known)}")
        with self._lock:
            self._waiting.append((fault, [fault.times]))
        return fault

    @property
    def left(self) -> list[Fault]:
        """Those that have not met all their requests yet; with times=None, always."""
        with self._lock:
            return [fault for fault, _ in self._waiting]

    def clear(self) -> None:
        """None is left; bodies that stand at a gate go on."""
        with self._lock:
            gone, self._waiting = self._waiting, []
        for fault, _ in gone:
            fault.gate.release()

    def take_answer(
        self, method: str, place: Place, repo: str | None, name: str, *, redirects: bool
    ) -> Fault | None:
        """The fault that replaces this answer, one time of it used up."""
        taken = self._take(
            lambda f: (
                f.kind in ANSWER_KINDS
                and f.meets(method, place, repo, name)
                and (f.kind != "refuse" or (redirects and place == "resolve"))
            ),
            at_most=1,
        )
        return taken[0] if taken else None

    def take_body(
        self,
        place: Place,
        repo: str,
        name: str,
        kinds: Collection[Kind],
        span: tuple[int, int],
        asked: bool,
    ) -> list[Fault]:
        """All faults of these kinds for a body of the file's bytes in span, one time of each."""
        return self._take(
            lambda f: (
                f.kind in kinds
                and f.meets("GET", place, repo, name)
                and f.fits(span[0], span[1], asked)
            )
        )

    def _take(self, wanted: Callable[[Fault], bool], at_most: int | None = None) -> list[Fault]:
        taken: list[Fault] = []
        with self._lock:
            for fault, left in self._waiting:
                if wanted(fault) and (at_most is None or len(taken) < at_most):
                    taken.append(fault)
                    left[0] = None if left[0] is None else left[0] - 1
            self._waiting = [(fault, left) for fault, left in self._waiting if left[0] != 0]
        return taken
