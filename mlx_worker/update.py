"""`mlx-worker update`: the newest version in the place of this one, however that was installed.

Owns telling how it was installed, which program upgrades that, and that the service runs the new
version afterwards. Leaves the service to its manager. Blocking, minutes; main thread.

    direct_url.json says editable         git pull --ff-only there; pip, if pyproject.toml changed
    uv-receipt.toml in the environment    uv tool upgrade
    pipx_metadata.json in it              pipx upgrade
    direct_url.json names a repository    pip install of the same
    none of these                         pip install --upgrade from the index

A file in the environment says that an upgrade was begun: held by one at a time, and not empty until
it is finished, so that what was cut short is done again rather than taken for done.

direct_url.json is what PEP 610 has installers write beside the package.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import unquote, urlsplit

from mlx_worker.errors import ConfigError, ServiceError, UpdateFailed
from mlx_worker.files import try_lock

PACKAGE = "mlx-worker"
TOLD = (PACKAGE, "mlx", "mlx-lm")  # whose versions are compared
INSTALL_S, GIT_S, ASK_S = 3600.0, 300.0, 120.0
STDERR = 2  # a descriptor: other programs write to it
PROJECT = "pyproject.toml"
ELSEWHERE = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX"}
UNFINISHED = "mlx-worker-update"  # the file that says so, in the environment
ROLL_BACK_S = 30.0  # that an installer may take to undo its work once it was interrupted
NOT_RESTARTED = (
    "no service runs; a worker in a terminal stays the old version until it is restarted"
)
Kind = Literal["uv", "pipx", "checkout", "repository", "folder", "index"]
TOOLS: Mapping[Kind, str] = {"uv": "uv-receipt.toml", "pipx": "pipx_metadata.json"}

ASK = """
import importlib.metadata as metadata, json
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
url = metadata.distribution("mlx-worker").read_text("direct_url.json")
print(json.dumps({"versions": {name: version(name) for name in NAMES}, "url": url}))
"""


@dataclass(frozen=True)
class Installation:
    """source: the folder of a checkout, or what pip installs; empty: a name of the index."""

    kind: Kind
    source: str = ""


@dataclass(frozen=True)
class Release:
    """What an installation says of itself. commit: of a checkout or a repository, else empty."""

    versions: Mapping[str, str | None]
    commit: str = ""

    def __str__(self) -> str:
        version = self.versions.get(PACKAGE) or "of an unknown version"
        return f"{version} ({self.commit[:10]})" if self.commit else version


def update() -> Iterator[str]:
    """Upgrade; yields lines for the user as it goes.

    Raises ConfigError for what the user must change first (nothing was touched), UpdateFailed with
    the way back, ServiceError.
    """
    # Before anything is replaced: modules of two versions don't go together.
    from mlx_worker.service.manager import manager

    service = manager()
    installation = find(_distribution(), Path(sys.prefix))
    check(installation)
    with _alone(Path(sys.prefix) / UNFINISHED) as mark:
        old = release(installation)
        yield f"this is {PACKAGE} {old}; {words(installation)}"
        is_again = mark.is_set
        new = _upgraded(installation, old, mark, is_again=is_again)
        if new == old and not is_again:
            mark.clear()
            yield "already the newest"
            return
        yield from news(old, new)
        yield from _told(_restarted(service))
        mark.clear()


@dataclass(frozen=True)
class Mark:
    """On a file that is held: an upgrade was begun, and isn't finished."""

    file: IO[str]

    @property
    def is_set(self) -> bool:
        return os.fstat(self.file.fileno()).st_size > 0

    def set(self) -> None:
        if not self.is_set:
            self.file.write("an update was begun\n")
            self.file.flush()

    def clear(self) -> None:
        self.file.truncate(0)


@contextmanager
def _alone(path: Path) -> Iterator[Mark]:
    """Raises ConfigError: another one runs, or nothing can be written there."""
    try:
        file = try_lock(path)
    except OSError as failed:
        raise ConfigError(
            f"{path} can't be written: {failed.strerror}", hint="run this as who installed it"
        ) from None
    if file is None:
        raise ConfigError("an update runs already", hint="wait for its end")
    with file:
        yield Mark(file)


def _upgraded(installation: Installation, old: Release, mark: Mark, *, is_again: bool) -> Release:
    """The new one. Raises as update does; also where the user interrupts it."""
    try:
        mark.set()
        upgrade(installation, old, is_again=is_again)
        return _new(installation, old)
    except ConfigError:  # nothing was changed
        if not is_again:
            mark.clear()
        raise
    except KeyboardInterrupt:
        hint = f"mlx-worker update, to go on; {way_back(installation, old)}"
        raise UpdateFailed("interrupted half way", hint=hint) from None


# --- how it was installed ---------------------------------------------------------------------


def _distribution() -> importlib.metadata.Distribution:
    """Raises ConfigError."""
    try:
        return importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"{Path(__file__).parent} is not installed, so it can't be upgraded",
            hint="install it, or get its newest files the way these came",
        ) from None


def find(distribution: importlib.metadata.Distribution, prefix: Path) -> Installation:
    """prefix: of the environment. Raises ConfigError for one that has no newer version to go to."""
    found = direct_url(distribution.read_text("direct_url.json"))
    if found.get("dir_info", {}).get("editable"):
        return of_url(found)
    for kind, file in TOOLS.items():
        if (prefix / file).exists():
            return Installation(kind, of_url(found).source if "vcs_info" in found else "")
    return of_url(found)


def direct_url(text: str | None) -> dict[str, Any]:
    """Empty where there is none. Raises ConfigError: it isn't of the form that PEP 610 has."""
    try:
        found = json.loads(text or "{}")
        forms = {"url": str, "vcs_info": dict, "dir_info": dict, "archive_info": dict}
        if all(isinstance(found.get(key, form()), form) for key, form in forms.items()):
            return found
    except (ValueError, AttributeError, RecursionError):
        pass
    raise ConfigError(
        "its direct_url.json can't be read, so it isn't known how it was installed",
        hint="install it again the way it came",
    )


def of_url(found: Mapping[str, Any]) -> Installation:
    """Of what direct_url.json says. Raises ConfigError."""
    url, vcs = str(found.get("url", "")), found.get("vcs_info")
    if vcs:
        revision = f"@{wanted}" if (wanted := vcs.get("requested_revision")) else ""
        return Installation("repository", f"{vcs.get('vcs', 'git')}+{url}{revision}")
    if "dir_info" in found:
        is_editable = bool(found["dir_info"].get("editable"))
        return Installation("checkout" if is_editable else "folder", unquote(urlsplit(url).path))
    if url:
        raise ConfigError(
            f"it was installed from one file, {url}, which has no newer version",
            hint=f"{installer_words()} the newer file",
        )
    return Installation("index")


def words(installation: Installation) -> str:
    source = shown(installation.source)
    how = {
        "uv": "uv upgrades it",
        "pipx": "pipx upgrades it",
        "checkout": f"git pulls {source}",
        "repository": f"pip installs {source}",
        "folder": f"pip installs {source}",
        "index": "pip upgrades it",
    }
    return how[installation.kind]


def shown(text: str) -> str:
    """Without the password or token that a URL in it may hold."""
    return re.sub(r"://[^/@\s]*:[^/@\s]*@|(?<=https)://[^/@\s]*@", "://…@", text)


# --- whether it can be upgraded ---------------------------------------------------------------


def check(installation: Installation) -> None:
    """Raises ConfigError for what would fail half way."""
    if installation.kind in ("uv", "pipx"):
        _program(installation.kind)
        return
    if sys.prefix == sys.base_prefix and _is_managed():
        raise ConfigError(
            f"the Python in {sys.prefix} is managed by its system, which upgrades it alone",
            hint=f"uv tool install {PACKAGE}, which has an environment of its own",
        )
    packages = sysconfig.get_path("purelib")
    if not os.access(packages, os.W_OK):
        raise ConfigError(
            f"{packages} can't be written to", hint="run this as the user who installed it"
        )
    installer()
    if installation.kind == "checkout":
        _check_checkout(Path(installation.source))
    elif installation.kind == "folder" and not (Path(installation.source) / PROJECT).is_file():
        raise ConfigError(f"{installation.source}, which it was installed from, is gone")


def _is_managed() -> bool:
    """As PEP 668 has distributors mark their Python."""
    return (Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED").exists()


def _check_checkout(folder: Path) -> None:
    """Raises ConfigError. Local changes are git's to judge: it refuses to overwrite one."""
    _program("git")
    if not (folder / PROJECT).is_file():
        raise ConfigError(f"{folder}, which it was installed from, is gone")
    looked = _git(folder, "rev-parse", "--is-inside-work-tree")
    if looked.returncode:
        raise ConfigError(
            f"{folder} is no git checkout: {_last(looked)}",
            hint="get its newest files the way these came",
        )
    if _git(folder, "symbolic-ref", "--quiet", "HEAD").returncode:
        raise ConfigError(
            f"{folder}: no branch is checked out", hint=f"git -C {folder} switch main"
        )
    if _git(folder, "rev-parse", "--abbrev-ref", "@{upstream}").returncode:
        raise ConfigError(
            f"{folder}: its branch follows no other, so there is nothing to pull",
            hint=f"git -C {folder} branch --set-upstream-to=origin/main",
        )


def _program(name: str) -> str:
    """Raises ConfigError."""
    found = shutil.which(name)
    if found is None:
        raise ConfigError(
            f"{name}, which installed it, is not in PATH", hint=f"install {name}, or add its folder"
        )
    return found


# --- upgrading --------------------------------------------------------------------------------


def upgrade(installation: Installation, old: Release, *, is_again: bool = False) -> None:
    """is_again: the last one was cut short. Raises ConfigError (nothing changed), UpdateFailed."""
    match installation.kind:
        case "uv":
            _run([_program("uv"), "tool", "upgrade", PACKAGE], installation, old)
        case "pipx":
            _run([_program("pipx"), "upgrade", PACKAGE], installation, old)
        case "checkout":
            _pull(installation, old, is_again=is_again)
        case "repository":
            # The same version at a newer commit is no upgrade to pip, so it is forced, alone first.
            forced = [*installer(), "--force-reinstall", "--no-deps", installation.source]
            _run(forced, installation, old)
            _run([*installer(), installation.source], installation, old)
        case "folder":
            _run([*installer(), installation.source], installation, old)
        case "index":
            _run([*installer(), "--upgrade", PACKAGE], installation, old)


def _pull(installation: Installation, old: Release, *, is_again: bool) -> None:
    folder = Path(installation.source)
    before = (folder / PROJECT).read_bytes()
    pulled = _git(folder, "pull", "--ff-only", "--quiet")
    if pulled.returncode:
        raise ConfigError(
            f"{folder}: git pull --ff-only: {_last(pulled)}",
            hint=f"see `git -C {folder} status`; nothing was changed",
        )
    if is_again or (folder / PROJECT).read_bytes() != before:
        _run([*installer(), "--editable", str(folder)], installation, old)


def installer() -> list[str]:
    """pip of this environment, or uv where that has none. Raises ConfigError."""
    if importlib.util.find_spec("pip"):
        options = ["--disable-pip-version-check", "--no-input"]
        return [sys.executable, "-m", "pip", "install", *options]
    return [_program("uv"), "pip", "install", "--python", sys.executable]


def installer_words() -> str:
    return "pip install" if importlib.util.find_spec("pip") else "uv pip install"


def _run(command: Sequence[str], installation: Installation, old: Release) -> None:
    """Its output goes to the user. Raises UpdateFailed."""
    try:
        # Standard output is for data: what an installer says is talk. Not in the folder where this
        # is run, whose modules and settings are none of its business.
        with subprocess.Popen(command, stdout=STDERR, cwd=sys.prefix) as running:
            code = _code(running)
    except (OSError, subprocess.SubprocessError) as failed:
        what = shown(f"{command[0]}: {failed}")
        raise UpdateFailed(what, hint=way_back(installation, old)) from None
    if code:
        raise UpdateFailed(
            f"`{shown(' '.join(command))}` ended with code {code}",
            hint=way_back(installation, old),
        )


def _code(running: "subprocess.Popen[bytes]") -> int:
    """Of its end. Raises TimeoutExpired, and KeyboardInterrupt once it has undone its work."""
    try:
        return running.wait(INSTALL_S)
    except KeyboardInterrupt:  # it was told as well
        with suppress(subprocess.TimeoutExpired):
            running.wait(ROLL_BACK_S)
        raise
    finally:
        running.kill()


def way_back(installation: Installation, old: Release) -> str:
    """What has the old version again; the service was not restarted, so it still runs that."""
    source = installation.source
    if installation.kind == "checkout":
        step = f"git -C {source} reset --keep {old.commit[:10]}"
    elif installation.kind == "folder":
        step = f"{installer_words()} an older {source}"
    else:
        step = f"{_install_words(installation.kind)} {_exactly(source, old)}"
    return f"back to the old one: {shown(step)}; a running service was left as it is"


def _install_words(kind: Kind) -> str:
    if kind in TOOLS:
        return f"{kind} {'tool ' if kind == 'uv' else ''}install --force"
    return f"{installer_words()} --force-reinstall --no-deps"


def _exactly(source: str, old: Release) -> str:
    """The old one, as an installer is told of it: at its commit, or of its version."""
    if not source:
        return f"{PACKAGE}=={old.versions.get(PACKAGE)}"
    repository = source.rpartition("@")[0] if "@" in urlsplit(source).path else source
    return f"{repository}@{old.commit}"


def _git(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """It asks for no password, which nobody would see. Raises ConfigError."""
    # GIT_DIR and the like, as a hook of git's has them, would name another repository.
    environ = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    environ |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    command = [_program("git"), "-C", str(folder), *arguments]
    try:
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{folder}: git {arguments[0]}: not done after {GIT_S:g} s",
            hint="see that its remote can be reached",
        ) from None


def _last(ran: "subprocess.CompletedProcess[str]") -> str:
    """What git says is wrong, without its advice."""
    lines = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("error:", "fatal:"))]
    first = (said or lines or [f"ended with code {ran.returncode}"])[0]
    files = [line for line in ran.stderr.splitlines() if line.startswith("\t")]
    what = first.removeprefix("error: ").removeprefix("fatal: ")
    return " ".join([what, ", ".join(file.strip() for file in files)]).strip()


# --- what came of it --------------------------------------------------------------------------


def release(installation: Installation) -> Release:
    """Asked of a new process, whatever this one has in memory. Raises UpdateFailed."""
    script = ASK.replace("NAMES", repr(TOLD))
    said = _fresh("-c", script).strip().splitlines()[-1:]  # what a .pth file prints comes before
    found = json.loads("".join(said) or "{}")
    vcs = direct_url(found["url"]).get("vcs_info", {})
    commit = str(vcs.get("commit_id", ""))
    if installation.kind == "checkout":
        commit = _git(Path(installation.source), "rev-parse", "HEAD").stdout.strip()
    return Release(found["versions"], commit)


def _new(installation: Installation, old: Release) -> Release:
    """The new one, which must be able to start. Raises UpdateFailed."""
    try:
        _fresh("-m", "mlx_worker", "--version")
        return release(installation)
    except UpdateFailed as failed:
        raise UpdateFailed(
            f"the new version doesn't start: {failed.message}", hint=way_back(installation, old)
        ) from None


def _fresh(*arguments: str) -> str:
    """Standard output of a new Python of this environment. Raises UpdateFailed."""
    # -P, and a folder without a package in it: what is installed is asked, not what lies around.
    command = [sys.executable, "-P", *arguments]
    try:
        ran = subprocess.run(
            command, cwd=sys.prefix, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as failed:
        raise UpdateFailed(str(failed)) from None
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or [f"it ended with code {ran.returncode}"]
        raise UpdateFailed(lines[-1])
    return ran.stdout


def news(old: Release, new: Release) -> Iterator[str]:
    """mlx-worker 0.3.0 → 0.4.0, and the same of what it stands on, where that changed."""
    if (old.versions.get(PACKAGE), old.commit) != (new.versions.get(PACKAGE), new.commit):
        yield f"{PACKAGE} {old} → {new}"
    for name in TOLD[1:]:
        before, after = old.versions.get(name), new.versions.get(name)
        if before != after:
            yield f"{name} {before} → {after}"


def _told(restarted: Iterator[str]) -> Iterator[str]:
    """Also that there was none, since what runs in a terminal is nobody's to restart."""
    lines = list(restarted)
    yield from lines or [NOT_RESTARTED]


def _restarted(service: Any) -> Iterator[str]:
    """Whatever of the service runs gets the new version; what doesn't run stays so."""
    for part in service.parts:
        state = service.state(part)
        if state.problem or not (state.is_installed and state.is_running):
            continue
        try:
            service.restart(part)
        except ServiceError as error:
            raise ServiceError(
                f"the new version is here, but the {part} could not be restarted: {error.message}",
                hint=error.hint or "mlx-worker service restart",
            ) from None
        yield f"the {part} was restarted and runs the new version"
