"""The settings a person writes: config.yaml and MLX_WORKER_* variables, as frozen sections.

Owns every default, the folder, and the order defaults < file < environment < flags. Leaves to
others what a setting does. Unknown keys are refused with the nearest known one. Any thread; reads
files only in load().
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
)

from mlx_worker.errors import ConfigError, shown
from mlx_worker.records import MAX_DEPTH, Acceptance, Speculation

ENV_PREFIX = "MLX_WORKER_"
ENV_HOME = "MLX_WORKER_HOME"
CONFIG_FILE = "config.yaml"

SECRET_KEYS = frozenset({"server.api_key"})  # no message shows their value
MIN_KEY_CHARS = 8
_HOST = r"(?:\[[0-9a-f:.]+\]|[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_])?)"
_PORT = r"(?::[1-9][0-9]{0,4})?"
_AUTHORITY = re.compile(_HOST + _PORT)
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_HOST}{_PORT}")
_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},}}")


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OtherModel(Section):
    """One more model that requests may name."""

    id: str
    draft: str = "auto"


class ModelSection(Section):
    """Which pair is loaded; others are loaded when a request names them."""

    id: str | None = None
    draft: str = "auto"
    others: tuple[OtherModel, ...] = ()


class GenerationSection(Section):
    """How one request is run when it doesn't say."""

    max_tokens: Annotated[int, Field(ge=1)] = 512


class LimitsSection(Section):
    """What a worker takes on.

    waiting       requests in line behind the one that is answered
    call_s        from a request's arrival to its last token; it fails then
    silence_s     without a step or a chunk, after which the engine counts as stuck
    loading_s     the same while a model is loaded
    memory_gb     of models, requests and prefix caches; None: what the machine recommends
    loaded        models in memory at a time, if they fit
    least_stay_s  that one stays once it is loaded
    """

    waiting: Annotated[int, Field(ge=0)] = 32
    call_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1800.0
    silence_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    loading_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1800.0
    memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    loaded: Annotated[int, Field(ge=1)] = 1
    least_stay_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0


class SpeculationSection(Section):
    """How drafts are used. depth None: the worker chooses by measuring."""

    mode: Speculation = "auto"
    depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    acceptance: Acceptance = "coupled"
    assistant_position: Literal["last_cached", "newest"] = "last_cached"


def _split(value: object) -> object:
    """A variable of the environment gives a list as `a, b`."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def _bindable(host: str) -> str:
    """A name or an address, without brackets or port."""
    if re.fullmatch(_HOST, host.lower()) and "[" not in host:
        return host
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        raise ValueError("must be a name or an address, without a port") from None
    return host


def _authorities(hosts: tuple[str, ...]) -> tuple[str, ...]:
    lowered = tuple(host.lower() for host in hosts)
    if not all(_AUTHORITY.fullmatch(host) for host in lowered):
        raise ValueError("must be names or addresses, each with or without :port")
    return lowered


def _origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """As a browser writes them: lower case, no default port."""
    lowered = tuple(origin.lower() for origin in origins)
    if not all(_ORIGIN.fullmatch(origin) for origin in lowered):
        raise ValueError("must be scheme://host or scheme://host:port each, without a path")
    return tuple(re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", one) for one in lowered)


def _strong(key: SecretStr) -> SecretStr:
    if not _KEY.fullmatch(key.get_secret_value()):
        raise ValueError(f"must be at least {MIN_KEY_CHARS} visible ASCII characters")
    return key


class ServerSection(Section):
    """Where the local API listens, and whom it answers.

    api_key          needed with every request but a bare /health and the files of the console page,
                     which hold no data; None: only on a loopback host
    allowed_hosts    names it may be called by, besides loopback names and the host's own
    allowed_origins  pages of other origins whose scripts may call it
    """

    host: Annotated[str, AfterValidator(_bindable)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8321
    api_key: Annotated[SecretStr, AfterValidator(_strong)] | None = None
    allowed_hosts: Annotated[
        tuple[str, ...], BeforeValidator(_split), AfterValidator(_authorities)
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], BeforeValidator(_split), AfterValidator(_origins)
    ] = ()


class Config(Section):
    """Everything that can be set; Config() is every default."""

    model: ModelSection = ModelSection()
    generation: GenerationSection = GenerationSection()
    speculation: SpeculationSection = SpeculationSection()
    server: ServerSection = ServerSection()
    limits: LimitsSection = LimitsSection()


def home() -> Path:
    """The worker's folder: MLX_WORKER_HOME, else ~/.mlx-worker. It may not exist yet."""
    return Path(os.environ.get(ENV_HOME) or "~/.mlx-worker").expanduser()


def known_keys() -> list[str]:
    """Every key, dotted: "speculation.mode"."""
    sections: dict[str, dict[str, Any]] = Config().model_dump()
    return [f"{section}.{key}" for section, keys in sections.items() for key in keys]


def load(path: Path | str | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read the configuration: defaults < file < environment.

    path     a YAML file that must exist; None means config.yaml in home(), if there is one
    environ  os.environ unless given; MLX_WORKER_SPECULATION__MODE sets speculation.mode

    Raises ConfigError: the file can't be read, is no YAML, or has an unknown key or a bad value.
    """
    file = Path(path) if path is not None else home() / CONFIG_FILE
    must_exist = path is not None
    values, lines = _read(file) if must_exist or file.exists() else ({}, {})
    origins = {key: f"{file}, line {line}" for key, line in lines.items()}
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX) and name != ENV_HOME:
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            origins[key] = name
            _put(values, key, value)
    return _build(values, origins)


def override(config: Config, flags: Mapping[str, object]) -> Config:
    """A new Config with dotted keys replaced; None means that the flag was not given.

    Raises ConfigError: an unknown key or a bad value.
    """
    values = config.model_dump()
    given = {key: value for key, value in flags.items() if value is not None}
    for key, value in given.items():
        _put(values, key, value)
    return _build(values, {})


def _build(values: dict[str, Any], origins: Mapping[str, str]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        origin = f"{origins[key]}: " if key in origins else ""
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"{origin}unknown key: {key}", hint=f"did you mean {_nearest(key)}?"
            ) from None
        limit = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        value = "" if key in SECRET_KEYS else f"{shown(first['input'])}, "
        raise ConfigError(f"{origin}{key}: {value}{limit}") from None


def _nearest(unknown: str) -> str:
    """The known key most like `unknown`, by its whole name or by its last part."""
    last = unknown.rpartition(".")[2]
    candidates = known_keys() + (list(Config.model_fields) if "." not in unknown else [])

    def likeness(known: str) -> float:
        by_last = difflib.SequenceMatcher(None, last, known.rpartition(".")[2]).ratio()
        return max(by_last, difflib.SequenceMatcher(None, unknown, known).ratio())

    return max(candidates, key=likeness)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A YAML file as nested dicts, and the line of each dotted key."""
    lines: dict[str, int] = {}
    try:
        text = file.read_text(encoding="utf-8")
        node = cast("yaml.Node | None", yaml.compose(text, Loader=_Loader))  # pyright: ignore[reportUnknownMemberType]
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{file}: must be sections with keys", hint="see config.example.yaml")
        for key, line in _key_lines(node):
            if key in lines:
                raise ConfigError(f"{file}, line {line}: {key}: already set in line {lines[key]}")
            lines[key] = line
        values: dict[str, Any] = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as broken:
        mark = broken.problem_mark or broken.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line}: {broken.problem or broken.context}") from None
    except yaml.YAMLError as broken:
        raise ConfigError(f"{file}: {broken}") from None
    except UnicodeDecodeError as broken:
        raise ConfigError(f"{file}: not UTF-8 at byte {broken.start}") from None
    except OSError as failed:
        raise ConfigError(f"{file}: {failed.strerror or failed}") from None
    # A section that is written without any key under it ("model:") is an empty section.
    return {key: {} if value is None else value for key, value in values.items()}, lines


class _Loader(yaml.SafeLoader):
    """YAML 1.2 booleans: only true and false, so `mode: off` and `id: no` stay words."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own class attribute)
        first: [(tag, regexp) for tag, regexp in resolvers if first in "tTfF" or "bool" not in tag]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _key_lines(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        yield dotted, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _key_lines(value, f"{dotted}.")


def _put(values: dict[str, Any], key: str, value: object) -> None:
    section, _, name = key.partition(".")
    if not name:
        values[key] = value
        return
    inner = values.get(section)
    values[section] = {**(inner if isinstance(inner, dict) else {}), name: value}
