"""A launchctl for tests: the verbs, orders, messages and codes of the real one, and its quirks.

Owns what launchd knows of a user's agents. What runs is a Job: here one that only pretends, in
supervisor.py a real process. As a program it keeps its state in a folder and records what it was
told there; anything that the real one would refuse fails, and so does a plist that it wouldn't
load, or that runs a shell.

    quirks  leaving   how many looks a job is still there after it was booted out
            settling  how many bootstraps fail with 5 after that
            bootout   the code that it fails with
            domain    false: nobody is logged in at the screen
"""

import json
import os
import plistlib
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mlx_worker.service.commands import Answer

UID = 501
DOMAIN = f"gui/{UID}"
SHELLS = {"sh", "bash", "zsh", "csh", "tcsh", "dash", "ksh", "fish", "env", "osascript"}
USAGE, MISUSE = 64, 99
NO_FILE, IO_ERROR, NO_DOMAIN, NO_SERVICE, DISABLED = 2, 5, 112, 113, 119
BAD_OWNERSHIP, UNSUPPORTED = 122, 125
NO_PROCESS = 3
NO_PID = 4_100_000  # above what a kernel gives

TYPES: dict[str, type] = {
    "Label": str,
    "ProgramArguments": list,
    "EnvironmentVariables": dict,
    "WorkingDirectory": str,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "Umask": int,
    "LimitLoadToSessionType": str,
}


class Refused(Exception):
    """What launchctl answers with: its code and its line."""

    def __init__(self, code: int, line: str):
        super().__init__(line)
        self.code, self.line = code, line


class Job(Protocol):
    """One that launchd has loaded."""

    @property
    def pid(self) -> int | None: ...
    @property
    def last_exit(self) -> int | None: ...
    def is_there(self) -> bool: ...  # asked by each look at it
    def kickstart(self, *, kills: bool) -> None: ...
    def leave(self) -> None: ...


def checked(path: Path) -> dict[str, Any]:
    """The keys of a plist that launchd would load."""
    if not path.is_absolute():
        raise Refused(MISUSE, f"misuse: not an absolute path: {path}")
    if not path.is_file():
        raise Refused(NO_FILE, "Bootstrap failed: 2: No such file or directory")
    if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(BAD_OWNERSHIP, "Bootstrap failed: 122: Path had bad ownership/permissions")
    keys = plistlib.loads(path.read_bytes())
    for key, value in keys.items():
        if type(value) is not TYPES.get(key):
            raise Refused(MISUSE, f"misuse: plist: {key}: {value!r}")
    check_program(keys["ProgramArguments"])
    if path.name != f"{keys['Label']}.plist":
        raise Refused(MISUSE, f"misuse: {path.name} has the label {keys['Label']}")
    for key in ("StandardOutPath", "StandardErrorPath"):
        if not Path(keys[key]).parent.is_dir():
            raise Refused(MISUSE, f"misuse: no folder for {keys[key]}: it would end with 78")
    return keys


def check_program(words: list[str]) -> None:
    program = Path(words[0])
    if not program.is_absolute() or not os.access(program, os.X_OK):
        raise Refused(MISUSE, f"misuse: {program} is no program by its absolute path")
    if program.name in SHELLS or any(word in ("-c", "-e") for word in words):
        raise Refused(MISUSE, f"misuse: a shell: {words}")


@dataclass
class Domain:
    """What launchd holds of one user: labels → jobs, and which may not start."""

    make: Callable[[dict[str, Any]], Job]
    jobs: dict[str, Job] = field(default_factory=dict)
    disabled: set[str] = field(default_factory=set)
    quirks: dict[str, Any] = field(default_factory=dict)
    settling: int = 0

    def command(self, words: list[str]) -> tuple[int, str, str]:
        """Code, standard output, standard error."""
        verb, *rest = words or [""]
        does = getattr(self, f"do_{verb.replace('-', '_')}", None)
        if does is None:
            return USAGE, "", f"Unrecognized subcommand: {verb}\n"
        try:
            return 0, does(*rest), ""
        except Refused as error:
            return error.code, "", f"{error.line}\n"
        except TypeError:
            return USAGE, "", f"Usage: launchctl {verb} ...\n"

    def do_bootstrap(self, domain: str, path: str) -> str:
        self._check_domain(
            domain, "Bootstrap failed: 125: Domain does not support specified action"
        )
        keys = checked(Path(path))
        label = keys["Label"]
        if label in self.disabled:
            raise Refused(DISABLED, "Bootstrap failed: 119: Service is disabled")
        if self._find(label) or self.settling:
            self.settling = max(0, self.settling - 1)
            raise Refused(
                IO_ERROR,
                "Bootstrap failed: 5: Input/output error\n"
                "Try re-running the command as root for richer errors.",
            )
        self.jobs[label] = self.make(keys)
        return ""

    def do_bootout(self, target: str) -> str:
        label, job = self._job(target, Refused(NO_PROCESS, "Boot-out failed: 3: No such process"))
        if code := self.quirks.get("bootout"):
            raise Refused(code, f"Boot-out failed: {code}: Operation not permitted")
        job.leave()
        self.settling = int(self.quirks.get("settling", 0))
        self._find(label)
        return ""

    def do_kickstart(self, *words: str) -> str:
        *flags, target = words
        if set(flags) - {"-k", "-p"}:
            raise TypeError
        self._job(target)[1].kickstart(kills="-k" in flags)
        return ""

    def do_print(self, target: str) -> str:
        _, job = self._job(target)
        pid = f"\tpid = {job.pid}\n" if job.pid else ""
        ended = job.last_exit
        last = "(never exited)" if ended is None else str(ended)
        signal = (
            f"\tlast terminating signal = Killed: {abs(ended or 0)}\n" if (ended or 0) < 0 else ""
        )
        return (
            f"{target} = {{\n\tactive count = 1\n\ttype = LaunchAgent\n"
            f"\tstate = {'running' if job.pid else 'not running'}\n\n"
            f"\tdefault environment = {{\n\t\tPATH => /usr/bin:/bin\n\t\tpid = 1\n\t}}\n\n"
            f"\truns = 1\n{pid}\tlast exit code = {0 if signal else last}\n{signal}}}\n"
        )

    def do_print_disabled(self, domain: str) -> str:
        self._check_domain(domain)
        lines = "".join(f'\t\t"{label}" => disabled\n' for label in sorted(self.disabled))
        return f"disabled services = {{\n{lines}\t}}\n"

    def do_enable(self, target: str) -> str:
        self.disabled.discard(self._label(target))
        return ""

    def do_disable(self, target: str) -> str:
        self.disabled.add(self._label(target))
        return ""

    # --- what they share ---

    def _check_domain(self, domain: str, line: str | None = None) -> None:
        if domain != DOMAIN:
            raise Refused(MISUSE, f"misuse: the domain {domain}")
        if self.quirks.get("domain") is False:
            if line:
                raise Refused(UNSUPPORTED, line)
            raise Refused(NO_DOMAIN, f"Could not find domain for user gui: {UID}")

    def _label(self, target: str) -> str:
        domain, _, label = target.rpartition("/")
        if domain != DOMAIN or not label:
            raise Refused(MISUSE, f"misuse: the target {target}")
        return label

    def _find(self, label: str) -> Job | None:
        """A job that is gone is forgotten."""
        job = self.jobs.get(label)
        if job and not job.is_there():
            del self.jobs[label]
            return None
        return job

    def _job(self, target: str, none: Refused | None = None) -> tuple[str, Job]:
        label = self._label(target)
        self._check_domain(target.rpartition("/")[0])
        job = self._find(label)
        if job is None:
            line = f'Could not find service "{label}" in domain for user gui: {UID}'
            raise none or Refused(NO_SERVICE, f"Bad request.\n{line}")
        return label, job


# --- as a program -----------------------------------------------------------------------------


@dataclass
class Pretended:
    """A job that runs nothing. looks: how many more it is there for; None: it isn't leaving."""

    pid: int | None = NO_PID
    last_exit: int | None = None
    looks: int | None = None
    quirk: int = 0

    def is_there(self) -> bool:
        if self.looks is not None:
            self.looks -= 1
        return self.looks is None or self.looks >= 0

    def kickstart(self, *, kills: bool) -> None:
        if self.pid is None or kills:
            self.pid = NO_PID + 1

    def leave(self) -> None:
        self.looks = self.quirk


def main(folder: Path, words: list[str]) -> int:
    """As the program that it stands for."""
    code, out, err = tell(folder, words)
    sys.stdout.write(out)
    sys.stderr.write(err)
    return code


def tell(folder: Path, words: list[str]) -> tuple[int, str, str]:
    """Tell the domain that is kept in the folder."""
    state = folder / "domain.json"
    kept = json.loads(state.read_text()) if state.exists() else {}
    quirks = kept.get("quirks", {})
    domain = Domain(lambda keys: Pretended(quirk=quirks.get("leaving", 0)))
    domain.quirks, domain.settling = quirks, kept.get("settling", 0)
    domain.disabled = set(kept.get("disabled", ()))
    domain.jobs = {label: Pretended(**job) for label, job in kept.get("jobs", {}).items()}
    code, out, err = domain.command(words)
    jobs = {label: asdict(job) for label, job in domain.jobs.items()}  # type: ignore[call-overload]
    lines = {"quirks": quirks, "settling": domain.settling, "jobs": jobs}
    state.write_text(json.dumps({**lines, "disabled": sorted(domain.disabled)}))
    with (folder / "told.jsonl").open("a") as file:
        file.write(json.dumps([*words, code]) + "\n")
    return code, out, err


class Launchctl:
    """The program in a folder, and what it was told."""

    def __init__(self, folder: Path, **quirks: Any) -> None:
        self._folder = folder
        self.path = folder / "launchctl"
        here = Path(__file__).resolve().parent
        self.path.write_text(
            f"#!{os.path.realpath(sys.executable)} -S\nimport sys\n"
            f"sys.path.insert(0, {str(here)!r})\nfrom pathlib import Path\nimport launchctl\n"
            f"sys.exit(launchctl.main(Path({str(folder)!r}), sys.argv[1:]))\n"
        )
        self.path.chmod(0o755)
        self.change(quirks=quirks)

    def ask(self, command: Sequence[str]) -> "Answer":
        """What the program would answer, without starting one."""
        from mlx_worker.service.commands import Answer

        assert command[0] == str(self.path)
        return Answer(*tell(self._folder, list(command[1:])))

    @property
    def kept(self) -> dict[str, Any]:
        state = self._folder / "domain.json"
        return json.loads(state.read_text()) if state.exists() else {}

    def change(self, **keys: Any) -> None:
        (self._folder / "domain.json").write_text(json.dumps({**self.kept, **keys}))

    def jobs(self) -> dict[str, dict[str, Any]]:
        return self.kept.get("jobs", {})

    def told(self) -> list[tuple[str, int]]:
        """The verbs that change something, with what each came to."""
        lines = (self._folder / "told.jsonl").read_text().splitlines()
        words = [json.loads(line) for line in lines]
        return [(word[0], word[-1]) for word in words if not word[0].startswith("print")]
