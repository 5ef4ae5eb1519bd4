"""What every supervisor of a user's services can be told, and which one this machine has.

Leaves how to launchd.py and systemd.py. Blocking; any thread.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from mlx_worker.config import DEFAULT_HOME

Part = Literal["worker", "menubar"]


@dataclass(frozen=True)
class ServiceState:
    """unit: its plist or unit file.

    is_installed  the file is there
    is_enabled    it starts at the next login
    is_loaded     the supervisor is in charge of it: it runs, or would again after a crash
    last_exit     the code it last ended with, -9 for signal 9; None: it never did, or nobody knows
    problem       why the supervisor can't be asked, in one line with a next step; None: it can
    home          the worker's folder as its unit names it; None: the usual one
    """

    part: Part
    unit: Path
    is_installed: bool
    is_enabled: bool = False
    is_loaded: bool = False
    pid: int | None = None
    last_exit: int | None = None
    problem: str | None = None
    home: Path | None = None

    @property
    def is_running(self) -> bool:
        return self.pid is not None

    @property
    def folder(self) -> Path:
        """Of the worker that it runs."""
        return self.home or Path(DEFAULT_HOME).expanduser()


class Manager(Protocol):
    """One supervisor. Every verb raises ServiceError with what it said and the next step."""

    name: str  # launchd, systemd
    parts: tuple[Part, ...]  # that it can run

    def install(self, part: Part) -> ServiceState:
        """Write its unit and start it, now and at each login; an old one gives way to it."""
        ...

    def uninstall(self, part: Part) -> bool:
        """End it and remove its unit; False: there was none."""
        ...

    def start(self, part: Part) -> ServiceState:
        """Start it, if it doesn't run, and again at each login."""
        ...

    def stop(self, part: Part, *, is_lasting: bool = False) -> ServiceState:
        """End it, which waits for its requests; is_lasting: the next login doesn't start it."""
        ...

    def restart(self, part: Part) -> ServiceState:
        """End it as stop does, and start it."""
        ...

    def state(self, part: Part) -> ServiceState:
        """What is so now. Never fails for what the supervisor answers or doesn't."""
        ...


def manager() -> Manager:
    """The one of this machine."""
    if sys.platform == "darwin":
        from mlx_worker.service.launchd import Launchd

        return Launchd()
    from mlx_worker.service.systemd import Systemd

    return Systemd()
