"""The disk, the worker's folder, config.yaml and policies.json.

Owns looking and judging. Blocking; any thread.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from mlx_worker.config import CONFIG_FILE, Config, home, load
from mlx_worker.doctor.check import Check, fault, ok, warning
from mlx_worker.doctor.device import gb
from mlx_worker.errors import ConfigError, parted
from mlx_worker.policies import Policies, default_path

LEAST_BYTES = 1_000_000_000  # below it logs, settings and downloads soon fail
OTHERS = 0o077  # of a file's mode: anybody but its owner


@dataclass(frozen=True)
class Settings:
    """The configuration, else what can be had of it. problem: why it isn't as it is written."""

    config: Config
    problem: ConfigError | None = None


def settings() -> Settings:
    """Never raises: a variable of the environment, or all of the file, is left out instead."""
    try:
        return Settings(load())
    except OSError as failed:
        file = failed.filename or home()
        return Settings(Config(), ConfigError(f"{file}: {failed.strerror}"))
    except ConfigError as error:
        try:
            return Settings(load(environ={}), error)
        except ConfigError:
            return Settings(Config(), error)


UNREAD = Settings(Config(), ConfigError(f"{CONFIG_FILE} can't be read: no answer of the disk"))


@dataclass(frozen=True)
class Disk:
    """what: is kept there."""

    what: str
    folder: Path
    free_bytes: int


@dataclass(frozen=True)
class Folder:
    """problem: why nothing can be written there; None: it can.

    config_mode  of config.yaml; None: there is none
    """

    path: Path
    exists: bool
    problem: str | None = None
    config_mode: int | None = None


# --- looking ----------------------------------------------------------------------------------


def disks() -> list[Disk]:
    from mlx_worker.models.cache import Cache, free_bytes

    places = {"models": Cache.default().folder, "the worker's folder": home()}
    return [Disk(what, folder, free_bytes(folder)) for what, folder in places.items()]


def folder() -> Folder:
    path, file = home(), home() / CONFIG_FILE
    try:
        mode = file.stat().st_mode & 0o777 if file.is_file() else None
        return Folder(path, path.exists(), _problem(path), mode)
    except OSError as error:
        return Folder(path, True, error.strerror or str(error))


def _problem(path: Path) -> str | None:
    """Why a file can't be made there; one is made and gone again."""
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        with TemporaryFile(dir=nearest) as file:
            file.write(b"x")
    except OSError as error:
        return error.strerror or str(error)
    return None


# --- judging ----------------------------------------------------------------------------------


def disk_check(disks: list[Disk], smallest_bytes: int) -> Check:
    """smallest_bytes: of the smallest model that there is to pull."""
    value = ", ".join(f"{gb(disk.free_bytes)} free for {disk.what}" for disk in disks)
    fullest = min(disks, key=lambda disk: disk.free_bytes)
    free = f"free some of the disk of {fullest.folder}"
    if fullest.free_bytes < LEAST_BYTES:
        return fault("disk", value, free)
    elif disks[0].free_bytes < smallest_bytes:
        what = f"{value}; the smallest model takes {gb(smallest_bytes)}"
        return warning("disk", what, f"free some of the disk of {disks[0].folder}, or set HF_HOME")
    else:
        return ok("disk", value)


def folder_check(folder: Folder, *, has_key: bool) -> Check:
    if folder.problem:
        what = f"{folder.path} can't be written to: {folder.problem}"
        step = f"see `ls -ld {folder.path}` and the disk, or set MLX_WORKER_HOME to another folder"
        return fault("folder", what, step)
    elif folder.config_mode and folder.config_mode & OTHERS and has_key:
        file = folder.path / CONFIG_FILE
        what = f"{file} holds a key, and others on this machine may read it"
        return warning("folder", what, f"chmod 600 {file}")
    else:
        return ok("folder", f"{folder.path}{'' if folder.exists else ', made at the first start'}")


def config_check(found: Settings, path: Path, *, exists: bool) -> Check:
    if error := found.problem:
        what = f"{error.message}; the lines below go by what can be read"
        return fault("config", what, error.hint or f"mend {path}, see `mlx-worker config show`")
    else:
        return ok("config", str(path) if exists else "the defaults: there is no config.yaml")


def settings_check(policies: Policies) -> Check:
    kept = policies.read()
    if kept.problem:
        what, step = parted(kept.problem)
        return fault("settings", f"{what}; drafting is off until then", step or "mend the file")
    else:
        drafting = kept.settings.speculative_decoding
        return ok("settings", f"speculative decoding {drafting}, revision {kept.revision}")


# --- both -------------------------------------------------------------------------------------


def look_at_disk() -> list[Check]:
    from mlx_worker.models import catalogue

    smallest = min(one.weights.n_bytes for one in catalogue.variants())
    return [disk_check(disks(), smallest)]


def look_at_folder(found: Settings) -> list[Check]:
    return [folder_check(folder(), has_key=_has_key(found))]


def look_at_config(found: Settings) -> list[Check]:
    file = home() / CONFIG_FILE
    return [config_check(found, file, exists=file.exists())]


def look_at_settings() -> list[Check]:
    return [settings_check(Policies(default_path()))]


def _has_key(found: Settings) -> bool:
    """Whether a key may be in config.yaml, also where it can't be read as settings."""
    if found.config.server.api_key or found.config.gateway.key:
        return True
    try:
        return found.problem is not None and b"key" in (home() / CONFIG_FILE).read_bytes()
    except OSError:
        return False
