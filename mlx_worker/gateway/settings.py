"""The settings of a gateway: a YAML file and flags, as one frozen record.

Owns every default, and what must be given before others may reach it. Leaves the file's syntax to
config.py. Any thread; reads files only in load().
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from mlx_worker.config import Section, bracketed, home, parse, read_text
from mlx_worker.errors import ConfigError, shown
from mlx_worker.http.checks import is_loopback, parse_authority
from mlx_worker.records import PLATFORM
from mlx_worker.wire.link import VISIBLE

CONFIG_FILE = "gateway.yaml"
DATABASE = "gateway.db"
SOME_HOST = "HOST"  # in a url: nothing says by which name it is reached


def _bindable(host: str) -> str:
    plain = bracketed(host)
    authority = parse_authority(plain.partition("%")[0] + ("]" if "%" in plain else ""))
    if authority is None or authority[1] is not None:
        raise ValueError("must be a name or an address, without a port")
    return host


def _authorities(hosts: tuple[str, ...]) -> tuple[str, ...]:
    if not all(parse_authority(host) for host in hosts):
        raise ValueError("must be names or addresses, each with or without :port")
    return tuple(host.lower() for host in hosts)


def default_database() -> Path:
    return home() / DATABASE


class GatewaySettings(Section):
    """Where a gateway listens, what it keeps where, and by which names it goes.

    display_name   who "Off (by …)" names
    behind_proxy   a proxy in front of it ends TLS, and says by X-Forwarded-* who asks for what
    allowed_hosts  names it may be called by, besides loopback names and the host's own
    """

    host: Annotated[str, AfterValidator(_bindable)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8400
    database: Path = Field(default_factory=default_database)
    display_name: Annotated[
        str, StringConstraints(strip_whitespace=True, max_length=64, pattern=VISIBLE)
    ] = PLATFORM
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    behind_proxy: bool = False
    allowed_hosts: Annotated[tuple[str, ...], AfterValidator(_authorities)] = ()

    @property
    def has_tls(self) -> bool:
        return self.tls_certificate is not None


def link_url(settings: GatewaySettings) -> str:
    """How a worker reaches it: by a public name if it has one, else on this machine."""
    if not (settings.has_tls or settings.behind_proxy):
        return f"ws://{bracketed(settings.host)}:{settings.port}"
    name = next(iter(settings.allowed_hosts), SOME_HOST)
    has_port = settings.has_tls and not settings.behind_proxy and ":" not in name
    return f"wss://{name}:{settings.port}" if has_port else f"wss://{name}"


def load(file: Path | None = None, flags: Mapping[str, object] | None = None) -> GatewaySettings:
    """Defaults < file < flags; a flag that is None was not given.

    file  None: gateway.yaml in the folder, if there is one

    Raises ConfigError: an unknown key, a bad value, or an address that others reach in plain text.
    """
    path = file or home() / CONFIG_FILE
    text = read_text(path) if file or path.exists() else ""
    values, lines = parse(text, path)
    origins = {key: f"{path}, line {line}: " for key, line in lines.items()}
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    origins = {key: at for key, at in origins.items() if key not in given}
    settings = _checked({**values, **given}, origins)
    _check_safe(settings)
    return settings


def _checked(values: dict[str, Any], origins: Mapping[str, str]) -> GatewaySettings:
    try:
        return GatewaySettings.model_validate(values)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        key = str(first["loc"][0])
        origin = origins.get(key, "")
        if first["type"] == "extra_forbidden":
            known = list(GatewaySettings.model_fields)
            [near] = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(f"{origin}unknown key: {key}", hint=f"did you mean {near}?") from None
        limit = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        raise ConfigError(f"{origin}{key}: {shown(first['input'])}, {limit}") from None


def _check_safe(settings: GatewaySettings) -> None:
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise ConfigError(
            "tls_certificate and tls_key: only one of them is given",
            hint="give both, each a file in PEM; or neither",
        )
    if is_loopback(settings.host) or settings.has_tls or settings.behind_proxy:
        return
    raise ConfigError(
        f"host: {settings.host} can be reached by others, and keys would cross the network in "
        "plain text",
        hint="give --tls-certificate and --tls-key, or --behind-proxy if a proxy in front of it "
        "ends TLS, or listen on 127.0.0.1",
    )
