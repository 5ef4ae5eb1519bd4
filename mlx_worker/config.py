"""The settings a person writes: config.yaml and MLX_WORKER_* variables, as frozen sections.

Owns every default, the folder, and the order defaults < file < environment < flags. Leaves to
others what a setting does. Unknown keys are refused with the nearest known one. Any thread; reads
files only in load().
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
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
    StringConstraints,
    ValidationError,
)

from mlx_worker.errors import ConfigError, shown
from mlx_worker.files import expanded
from mlx_worker.records import MAX_DEPTH, Acceptance, Speculation

ENV_PREFIX = "MLX_WORKER_"
ENV_HOME = "MLX_WORKER_HOME"
CONFIG_FILE = "config.yaml"
MEMORY_SHARE = 0.75
DEFAULT_HOME = "~/.mlx-worker"
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # nobody can be called so; this reaches it here

SECRET_KEYS = frozenset({"server.api_key", "gateway.key"})  # no message shows their value
HIDDEN_KEYS = SECRET_KEYS | {"gateway.url"}  # somebody may have put a password into one
MIN_KEY_CHARS = 8
LEAST_TEMPERATURE = 1e-6
_HOST = r"(?:\[[0-9a-f:.]+\]|[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_])?)"
_PORT = r"(?::[1-9][0-9]{0,4})?"
_AUTHORITY = re.compile(_HOST + _PORT)
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_HOST}{_PORT}")
_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},}}")
_WORKER_KEY = re.compile(r"mww_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_GATEWAY = re.compile(rf"(wss?)://({_HOST}){_PORT}(/[!-~]*)?")
LINK_PATH = "/ws/worker"
OLD_MODEL = "model"  # the section of 0.1.0 in the place of the list
RETIRED = frozenset({"prefill_chunk_tokens"})
MAX_PORT = 65535


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _temperature(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"must be 0 for greedy, or at least {LEAST_TEMPERATURE:g}")
    return value


Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class SamplingSection(Section):
    """What a model's requests are sampled with when they don't say; the ranges are a request's.

    None: as the model's own generation_config says
    """

    temperature: (
        Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_temperature)] | None
    ) = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    @property
    def given(self) -> dict[str, float]:
        """Those that are set."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


def _section(value: object) -> object:
    """A section that is written without any key under it is an empty one."""
    return {} if value is None else value


class ModelEntry(Section):
    """A model that requests may name.

    draft           auto, none, lookup, or a name
    context_tokens  of a prompt and its reply; None: as many as the model was made for
    preload         load it at the start; None: if it is the default
    """

    id: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    draft: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)] = "auto"
    context_tokens: Annotated[int, Field(ge=1)] | None = None
    preload: bool | None = None
    sampling: Annotated[SamplingSection, BeforeValidator(_section)] = SamplingSection()


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


def _listed(value: object) -> object:
    """A variable of the environment gives the models as YAML or JSON."""
    if not isinstance(value, str):
        return value
    try:
        parsed = parse_yaml(value)
    except yaml.YAMLError:
        raise ValueError("must be a list in YAML or JSON") from None
    return () if parsed is None else parsed


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
    port: Annotated[int, Field(ge=0, le=MAX_PORT)] = 8321
    api_key: Annotated[SecretStr, AfterValidator(_strong)] | None = None
    allowed_hosts: Annotated[
        tuple[str, ...], BeforeValidator(_split), AfterValidator(_authorities)
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], BeforeValidator(_split), AfterValidator(_origins)
    ] = ()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _gateway_url(url: str) -> str:
    """Its host in lower case; the path of the link where it has none."""
    scheme, separator, rest = url.strip().partition("://")
    authority, slash, path = rest.partition("/")
    lowered = f"{scheme}{separator}{authority}".lower() + slash + path
    found = _GATEWAY.fullmatch(lowered)
    if not found or set("?#") & set(path):
        raise ValueError(
            "must be wss://HOST or wss://HOST:PORT (ws:// on this machine), as `mlx-worker gateway "
            "worker add` prints it, without a name, key or query in it"
        )
    port = authority.rpartition("]")[2].partition(":")[2]
    if port and not 1 <= int(port) <= MAX_PORT:
        raise ValueError(f"must have a port from 1 to {MAX_PORT}")
    if found[1] == "ws" and not _is_loopback(found[2]):
        raise ValueError("must begin with wss://; ws:// is for a gateway on this machine alone")
    return lowered if path else f"{lowered.rstrip('/')}{LINK_PATH}"


def _worker_key(key: SecretStr) -> SecretStr:
    if not _WORKER_KEY.fullmatch(key.get_secret_value()):
        raise ValueError(
            "must be a worker's key, mww_ and what follows, as `mlx-worker gateway worker add` "
            "shows it once"
        )
    return key


class GatewaySection(Section):
    """The gateway that this worker serves beside its local API; with neither, none.

    url  of the gateway, with the path of the link
    key  of this worker, whose id is in it
    """

    url: Annotated[str, AfterValidator(_gateway_url)] | None = None
    key: Annotated[SecretStr, AfterValidator(_worker_key)] | None = None

    @property
    def is_set(self) -> bool:
        return self.url is not None and self.key is not None

    @property
    def host(self) -> str:
        """What of the url is shown: HOST or HOST:PORT."""
        return (self.url or "").partition("://")[2].partition("/")[0]

    @property
    def worker_id(self) -> str:
        """As it stands in the key; empty without one."""
        found = _WORKER_KEY.fullmatch(self.key.get_secret_value()) if self.key else None
        return found[1] if found else ""


class Config(Section):
    """Everything that can be set; Config() is every default."""

    models: Annotated[tuple[ModelEntry, ...], BeforeValidator(_listed)] = ()
    generation: GenerationSection = GenerationSection()
    speculation: SpeculationSection = SpeculationSection()
    server: ServerSection = ServerSection()
    limits: LimitsSection = LimitsSection()
    gateway: GatewaySection = GatewaySection()


def home() -> Path:
    """The worker's folder: MLX_WORKER_HOME, else ~/.mlx-worker. It may not exist yet.

    Raises ConfigError: it is under a user that isn't known.
    """
    named = os.environ.get(ENV_HOME)
    folder = expanded(named or DEFAULT_HOME)
    if str(folder).startswith("~"):
        what = f"{ENV_HOME}: {shown(named)}" if named else str(folder)
        raise ConfigError(
            f"{what}: there is no such user here", hint=f"set {ENV_HOME} to a whole path"
        )
    return folder


def memory_bytes(gigabytes: float | None) -> int:
    """What limits.memory_gb means where nothing better is known: a share of this machine's memory.

    On a Mac the engine asks Metal instead (engine/memory.py).
    """
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    return int(MEMORY_SHARE * machine_bytes())


def machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bracketed(host: str) -> str:
    """As a URL, or a place with a port, has it."""
    return f"[{host}]" if ":" in host else host


def reachable(host: str) -> str:
    """How this machine reaches what listens there, as a URL has it."""
    return bracketed(EVERYWHERE.get(host, host))


def known_keys() -> list[str]:
    """Every key, dotted: "speculation.mode"; of the models, which are a list, only "models"."""
    return list(_dotted(Config().model_dump()))


def entry_keys() -> list[str]:
    """Every key of one of the models, dotted: "sampling.temperature"."""
    return list(_dotted(ModelEntry(id="x").model_dump()))


def _dotted(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _dotted(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def load(path: Path | str | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read the configuration: defaults < file < environment.

    path     a YAML file that must exist; None means config.yaml in home(), if there is one
    environ  os.environ unless given; MLX_WORKER_SPECULATION__MODE sets speculation.mode

    Raises ConfigError: the file can't be read, is no YAML, or has an unknown key or a bad value.
    """
    file = Path(path) if path is not None else home() / CONFIG_FILE
    must_exist = path is not None
    is_wanted = must_exist or is_there(file) or file.is_symlink()  # whose file isn't there now
    text = read_text(file) if is_wanted else ""
    values, lines = parse(text, file)
    origins = {key: f"{file}, line {line}" for key, line in lines.items()}
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX) and name != ENV_HOME:
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            origins = {k: v for k, v in origins.items() if not k.startswith(f"{key}.")}
            origins[key] = name
            _put(values, key, value)
    return check(*renewed(values, origins))


def renewed(
    values: dict[str, Any], origins: Mapping[str, str]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """What an earlier version wrote, in today's keys. Leaves `values` as they are.

    Of 0.1.0: `model`, a section, is the first of `models`; generation.prefill_chunk_tokens, which
    nothing reads any more, is left out.
    """
    values = dict(values)
    generation = values.get("generation")
    if isinstance(generation, dict):
        items = cast("dict[str, Any]", generation).items()
        values["generation"] = {key: one for key, one in items if key not in RETIRED}
    if OLD_MODEL not in values or values.get("models"):
        return values, origins
    section = values.pop(OLD_MODEL)
    if not isinstance(section, dict):
        return {**values, OLD_MODEL: section}, origins
    model = cast("dict[str, Any]", section)
    others: list[Any] = model.get("others") or []
    model = {key: one for key, one in model.items() if key != "others"}
    first = [] if model.get("id") is None else [model]
    values["models"] = [*first, *others]
    moved = {
        f"models.0{key.removeprefix(OLD_MODEL)}": where
        for key, where in origins.items()
        if f"{key}.".startswith(f"{OLD_MODEL}.")
    }
    return values, {**origins, **moved}


def override(config: Config, flags: Mapping[str, object]) -> Config:
    """A new Config with dotted keys replaced; None means that the flag was not given.

    Raises ConfigError: an unknown key or a bad value.
    """
    values = config.model_dump()
    given = {key: value for key, value in flags.items() if value is not None}
    for key, value in given.items():
        _put(values, key, value)
    return check(values, {})


def check(values: dict[str, Any], origins: Mapping[str, str]) -> Config:
    """The Config of such values. origins: dotted key → where it is set, for messages.

    Raises ConfigError: an unknown key or a bad value.
    """
    try:
        config = Config.model_validate(values)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        origin = _origin(key, origins)
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"{origin}unknown key: {key}", hint=f"did you mean {nearest(key)}?"
            ) from None
        limit = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        if first["type"] == "model_type":
            is_entry = key.startswith("models.")
            limit = f"must be {'an entry, as in {id: demo}' if is_entry else _keys_below(key)}"
        if first["type"] == "missing":
            raise ConfigError(f"{origin}{key}: is missing") from None
        is_hidden = any(f"{one}.".startswith(f"{key}.") for one in HIDDEN_KEYS)
        value = "" if is_hidden else f"{shown(first['input'])}, "
        raise ConfigError(f"{origin}{key}: {value}{limit}") from None
    _check_models(config, origins)
    return config


def known(values: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that this version doesn't know. Leaves `values` as they are."""
    try:
        Config.model_validate(values)
    except ValidationError as invalid:
        values = deepcopy(values)
        for error in invalid.errors(include_url=False):
            if error["type"] == "extra_forbidden":
                _remove(values, error["loc"])
    return values


def _remove(values: Any, place: tuple[int | str, ...]) -> None:
    for part in place[:-1]:
        values = values[part]
    del values[place[-1]]


def _keys_below(key: str) -> str:
    """What has to stand there instead of one value: the keys of the section."""
    under = [known.removeprefix(f"{key}.") for known in known_keys() if known.startswith(f"{key}.")]
    return f"a section, with lines below it: {', '.join(under)}"


def _check_models(config: Config, origins: Mapping[str, str]) -> None:
    """What no entry can see alone. Raises ConfigError."""
    seen: dict[str, int] = {}
    for n, entry in enumerate(config.models):
        if entry.id in seen:
            key = f"models.{n}.id"
            raise ConfigError(
                f"{_origin(key, origins)}{key}: {shown(entry.id)}, "
                f"must differ from that of models.{seen[entry.id]}"
            )
        seen[entry.id] = n
    n_preloaded, most = sum(entry.preload is True for entry in config.models), config.limits.loaded
    if n_preloaded > most:
        raise ConfigError(
            f"{_origin('models', origins)}models: {n_preloaded} have preload: true, "
            f"must be at most limits.loaded, which is {most}",
            hint=f"raise limits.loaded to {n_preloaded}, or preload fewer",
        )


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """Where a key is set, or what it is a part of, or else the first part of it."""
    ancestor = key
    while ancestor not in origins and "." in ancestor:
        ancestor = ancestor.rpartition(".")[0]
    parts = (part for part in sorted(origins) if part.startswith(f"{key}."))
    found = ancestor if ancestor in origins else next(parts, None)
    return f"{origins[found]}: " if found else ""


def nearest(unknown: str) -> str:
    """The known key most like `unknown`, by its whole name or by its last part."""
    last = unknown.rpartition(".")[2]
    candidates = known_keys() + (list(Config.model_fields) if "." not in unknown else [])
    if entry := re.match(r"models\.\d+\.", unknown):
        candidates = [f"{entry[0]}{key}" for key in [*entry_keys(), "sampling"]]

    def likeness(known: str) -> float:
        by_last = difflib.SequenceMatcher(None, last, known.rpartition(".")[2]).ratio()
        return max(by_last, difflib.SequenceMatcher(None, unknown, known).ratio())

    return max(candidates, key=likeness)


def is_there(file: Path) -> bool:
    """Also one in a folder that may not be looked into: reading it says so then."""
    try:
        return file.exists()
    except OSError:
        return True


def read_text(file: Path) -> str:
    """What is in the file, line ends as they are. Raises ConfigError."""
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as broken:
        raise ConfigError(f"{file}: not UTF-8 at byte {broken.start}") from None
    except OSError as failed:
        raise ConfigError(f"{file}: {failed.strerror or failed}") from None


def parse(text: str, file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A YAML file's text as nested dicts, and the line of each dotted key. Raises ConfigError."""
    lines: dict[str, int] = {}
    try:
        node = cast("yaml.Node | None", yaml.compose(text, Loader=Loader))  # pyright: ignore[reportUnknownMemberType]
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{file}: must be sections with keys", hint="see config.example.yaml")
        for key, line in _mapping_lines(node):
            if key in lines:
                raise ConfigError(f"{file}, line {line}: {key}: already set in line {lines[key]}")
            lines[key] = line
        values = cast("dict[str, Any]", parse_yaml(text))
    except yaml.MarkedYAMLError as broken:
        mark = broken.problem_mark or broken.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line}: {broken.problem or broken.context}") from None
    except yaml.YAMLError as broken:
        raise ConfigError(f"{file}: {broken}") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply") from None
    # A section that is written without any key under it ("server:") is an empty section.
    empty: dict[str, Any] = {"models": []}
    return {
        key: empty.get(key, {}) if value is None else value for key, value in values.items()
    }, lines


def parse_yaml(text: str) -> object:
    """Raises yaml.YAMLError."""
    return yaml.load(text, Loader=Loader)


class Loader(yaml.SafeLoader):
    """YAML 1.2 booleans: only true and false, so `mode: off` and `id: no` stay words."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own class attribute)
        first: [(tag, regexp) for tag, regexp in resolvers if first in "tTfF" or "bool" not in tag]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _mapping_lines(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        yield dotted, key.start_mark.line + 1
        yield from _key_lines(value, f"{dotted}.")


def _key_lines(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
    """Of the keys in a value; an item of a list has its number for a key."""
    if isinstance(node, yaml.MappingNode):
        yield from _mapping_lines(node, prefix)
    elif isinstance(node, yaml.SequenceNode):
        for n, item in enumerate(node.value):
            yield f"{prefix}{n}", item.start_mark.line + 1
            yield from _key_lines(item, f"{prefix}{n}.")


def _put(values: dict[str, Any], key: str, value: object) -> None:
    section, _, name = key.partition(".")
    if not name:
        values[key] = value
        return
    inner = values.get(section)
    values[section] = {**(inner if isinstance(inner, dict) else {}), name: value}
