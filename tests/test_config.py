"""What config.yaml, the environment and the flags set, and how mistakes in them are explained."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mlx_worker.config import (
    SECRET_KEYS,
    Config,
    ModelEntry,
    SamplingSection,
    entry_keys,
    home as folder,
    known_keys,
    load,
    override,
)
from mlx_worker.engine.validate import check_sampling
from mlx_worker.errors import ConfigError, InvalidParameter
from mlx_worker.records import Sampling

EXAMPLE = Path(__file__).parent.parent / "config.example.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def refusal(file: Path, text: str, environ: dict[str, str] | None = None) -> str:
    """The message that this file (and environment) is refused with, without the file's folder."""
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file, environ or {})
    return str(caught.value).replace(f"{file.parent}/", "")


def test_the_example_file_is_every_default():
    """config.example.yaml never drifts from the code."""
    assert load(EXAMPLE, {}) == Config()


def test_the_example_file_explains_every_key():
    """Each key stands in the file, below one comment line."""
    sections = yaml.safe_load(EXAMPLE.read_text())
    found = [f"{name}.{key}" for name in sections for key in sections[name]]
    assert ["models", *found] == known_keys()
    lines = EXAMPLE.read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if line.startswith("  ") and "#" not in line:
            assert above.startswith("  # "), line


def test_no_file_and_no_variables_give_the_defaults():
    """A fresh machine needs no configuration."""
    assert load(environ={}) == Config()


def test_the_folder_is_mlx_worker_in_the_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Without MLX_WORKER_HOME the folder is ~/.mlx-worker."""
    monkeypatch.delenv("MLX_WORKER_HOME")
    assert folder() == home / ".mlx-worker"


def test_the_folder_follows_mlx_worker_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """MLX_WORKER_HOME moves the folder, and ~ in it is understood."""
    monkeypatch.setenv("MLX_WORKER_HOME", "~/elsewhere")
    assert folder() == tmp_path / "elsewhere"


def test_the_file_in_the_folder_is_read(home: Path):
    """load() without a path reads config.yaml in the folder."""
    (home / ".mlx-worker").mkdir()
    (home / ".mlx-worker" / "config.yaml").write_text("models: [{id: some/model}]\n")
    assert [entry.id for entry in load(environ={}).models] == ["some/model"]


def test_environment_wins_over_file_and_flags_win_over_both(file: Path):
    """The order is defaults < file < environment < flags."""
    file.write_text("speculation: {mode: on, depth: 2}\ngeneration: {max_tokens: 9}\n")
    config = load(file, {"MLX_WORKER_SPECULATION__DEPTH": "4", "MLX_WORKER_HOME": "/ignored"})
    assert (config.speculation.mode, config.speculation.depth) == ("on", 4)
    config = override(config, {"speculation.depth": 0, "speculation.mode": None})
    assert (config.speculation.mode, config.speculation.depth) == ("on", 0)
    assert config.generation.max_tokens == 9


def test_a_bare_off_is_a_word(file: Path):
    """YAML 1.1 reads off as false; mode: off must still mean off."""
    file.write_text("speculation: {mode: off}\n")
    assert load(file, {}).speculation.mode == "off"


def test_an_empty_file_and_an_empty_section_set_nothing(file: Path):
    """Commenting out every key of a section leaves a valid file."""
    file.write_text("")
    assert load(file, {}) == Config()
    file.write_text("models:\n  # - id: x\nserver:\n  # port: 1\n")
    assert load(file, {}) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models: [{id: x}]\nspeculation:\n  depht: 3\n",
            "config.yaml, line 3: unknown key: speculation.depht. "
            "hint: did you mean speculation.depth?",
        ),
        (
            "speculaton: {mode: on}\n",
            "config.yaml, line 1: unknown key: speculaton. hint: did you mean speculation?",
        ),
        (
            "depth: 3\n",
            "config.yaml, line 1: unknown key: depth. hint: did you mean speculation.depth?",
        ),
        (
            "speculation:\n  depth: 12\n",
            "config.yaml, line 2: speculation.depth: 12, should be less than or equal to 8",
        ),
        (
            "speculation: {mode: fast}\n",
            "config.yaml, line 1: speculation.mode: 'fast', should be 'auto', 'on' or 'off'",
        ),
        (
            "limits:\n  loaded: 1\n  loaded: 2\n",
            "config.yaml, line 3: limits.loaded: already set in line 2",
        ),
        (
            "models:\n  [1\nx: 2\n",
            "config.yaml, line 3: expected ',' or ']', but got ':'",
        ),
        ("- a\n", "config.yaml: must be sections with keys. hint: see config.example.yaml"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(file: Path, text: str, message: str):
    """A person can mend the file from the message alone."""
    assert refusal(file, text) == message


def test_a_mistake_in_a_variable_names_the_variable(file: Path):
    """An unknown variable is refused like an unknown key, and a bad value says who set it."""
    assert refusal(file, "", {"MLX_WORKER_SPECULATION__MOD": "on"}) == (
        "MLX_WORKER_SPECULATION__MOD: unknown key: speculation.mod. "
        "hint: did you mean speculation.mode?"
    )
    assert refusal(file, "speculation: {depth: 1}\n", {"MLX_WORKER_SPECULATION__DEPTH": "x"}) == (
        "MLX_WORKER_SPECULATION__DEPTH: speculation.depth: 'x', "
        "should be a valid integer, unable to parse string as an integer"
    )


def test_a_named_file_must_exist(file: Path):
    """--config with a wrong path is an error, not the defaults."""
    with pytest.raises(ConfigError, match="No such file"):
        load(file, {})


def test_a_file_that_is_no_text_is_refused(file: Path):
    """Bytes that are no UTF-8 give a message, not a traceback."""
    file.write_bytes(b"models: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 8"):
        load(file, {})


def test_a_file_nested_too_deeply_is_refused(tmp_path: Path):
    """In a line, not in a traceback."""
    file = tmp_path / "deep.yaml"
    file.write_text("[" * 1_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(file, {})


def test_the_server_listens_on_loopback_without_a_key_unless_told():
    """Nobody else can call a fresh installation, so nobody needs a key."""
    server = Config().server
    assert (server.host, server.port, server.api_key) == ("127.0.0.1", 8321, None)
    assert (server.allowed_hosts, server.allowed_origins) == ((), ())


def test_lists_can_be_given_as_a_variable(file: Path):
    """Separated by commas, as a variable has no other way."""
    file.write_text("")
    names = {"ALLOWED_HOSTS": "Mac.local, [::1]:9000,", "ALLOWED_ORIGINS": ""}
    environ = {f"MLX_WORKER_SERVER__{name}": value for name, value in names.items()}
    server = load(file, environ).server
    assert (server.allowed_hosts, server.allowed_origins) == (("mac.local", "[::1]:9000"), ())


def test_origins_are_kept_as_browsers_write_them(file: Path):
    """In lower case and without a default port, so that they can be compared as they come."""
    file.write_text(
        "server: {allowed_origins: ['HTTPS://Chat.Example:443', 'http://a:80', 'http://b:443',"
        " 'https://c:80', 'http://[::1]:3000', 'app://obsidian.md']}\n"
    )
    assert load(file, {}).server.allowed_origins == (
        "https://chat.example", "http://a", "http://b:443", "https://c:80", "http://[::1]:3000",
        "app://obsidian.md",
    )  # fmt: skip


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "", "chat.example", "https://", "https://a/", "https://a/b", "https://a?b",
     "https://u@a", "https://a:", "https://a:x", "https://a:0", "https://*.a", "https://a b",
     "//a", "https:a", "https://a,https://b/", "https://a\n"],
)  # fmt: skip
def test_an_origin_that_is_none_is_refused(file: Path, origin: str):
    """A pattern, a path or a user would never match, or match too much."""
    message = refusal(file, yaml.safe_dump({"server": {"allowed_origins": [origin]}}))
    assert message.endswith("must be scheme://host or scheme://host:port each, without a path")


@pytest.mark.parametrize("host", ["*", "", "http://a", "a/b", "u@a", "a:", "a:x", "::1", "a b"])
def test_a_listed_host_that_is_none_is_refused(file: Path, host: str):
    """It is compared with what a Host header can say."""
    message = refusal(file, yaml.safe_dump({"server": {"allowed_hosts": [host]}}))
    assert message.endswith("must be names or addresses, each with or without :port")


@pytest.mark.parametrize("host", ["", "*", "a:1", "[::1]", "http://a", "127.0.0.1:80", "a b"])
def test_a_host_that_can_not_be_listened_on_is_refused(file: Path, host: str):
    """A port has a key of its own."""
    message = refusal(file, yaml.safe_dump({"server": {"host": host}}))
    assert message.endswith("must be a name or an address, without a port")


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1", "::", "fe80::1%en0", "Mac.local"])
def test_a_name_or_an_address_can_be_listened_on(file: Path, host: str):
    """Either version of the protocol."""
    file.write_text(yaml.safe_dump({"server": {"host": host}}))
    assert load(file, {}).server.host == host


@pytest.mark.parametrize("port", [-1, 65536, "x", 1.5])
def test_a_port_is_from_0_to_65535(file: Path, port: object):
    """0 is any free one."""
    assert "server.port" in refusal(file, yaml.safe_dump({"server": {"port": port}}))


@pytest.mark.parametrize("key", ["", "hunter2", "hunter2 hunter2", "hunter2é-hunter2", 12345678])
def test_a_bad_key_is_refused_without_being_shown(file: Path, key: object):
    """The message says what is wrong with it, and lands in logs."""
    message = refusal(file, yaml.safe_dump({"server": {"api_key": key}}))
    assert message.startswith("config.yaml, line 2: server.api_key: ")
    assert "hunter" not in message
    assert "12345678" not in message


def test_no_way_of_printing_a_config_shows_the_key(file: Path):
    """Nor does overriding lose it."""
    file.write_text("server: {api_key: hunter2-hunter2}\n")
    config = override(load(file, {}), {"server.port": 9000})
    assert config.server.api_key
    assert config.server.api_key.get_secret_value() == "hunter2-hunter2"
    for text in (repr(config), str(config), config.model_dump_json(), str(config.model_dump())):
        assert "hunter2" not in text
    assert set(known_keys()) >= SECRET_KEYS


# --- gateway ----------------------------------------------------------------------------------

WORKER_KEY = "mww_0123456789abcdef_" + "A-_z" * 10 + "abc"


@pytest.mark.parametrize(
    ("url", "dialled"),
    [
        ("wss://Gateway.Example", "wss://gateway.example/ws/worker"),
        ("WSS://gateway.example:8443/", "wss://gateway.example:8443/ws/worker"),
        ("wss://gateway.example/Of/us", "wss://gateway.example/Of/us"),
        ("ws://127.0.0.1:8400", "ws://127.0.0.1:8400/ws/worker"),
        ("ws://localhost:8400", "ws://localhost:8400/ws/worker"),
        ("ws://[::1]:8400", "ws://[::1]:8400/ws/worker"),
    ],
)
def test_a_gateway_is_dialled_at_the_links_path_unless_it_has_one(
    file: Path, url: str, dialled: str
):
    """And the worker's id is read from its key."""
    file.write_text(yaml.safe_dump({"gateway": {"url": url, "key": WORKER_KEY}}))
    gateway = override(load(file, {}), {"server.port": 1}).gateway
    assert (gateway.url, gateway.worker_id) == (dialled, "0123456789abcdef")
    assert gateway.is_set
    assert gateway.host == dialled.split("/")[2]


def test_a_value_in_place_of_a_section_is_told_its_keys(file: Path):
    """In words of the file, with the line."""
    message = refusal(file, yaml.safe_dump({"gateway": "ws://127.0.0.1:8400"}))
    what = "must be a section, with lines below it: url, key"
    assert message == f"config.yaml, line 1: gateway: {what}"


@pytest.mark.parametrize(
    "url",
    [
        "ws://gateway.example",
        "ws://192.168.0.2:8400",
        "ws://127.0.0.1.example",
        "https://gateway.example",
        "gateway.example",
        "wss://me:hunter2-hunter2@gateway.example",
        "wss://gateway.example/ws?key=hunter2-hunter2",
        "wss://gateway.example/ws#hunter2",
        "wss://",
        "wss://gateway.example:0",
        "wss://gateway.example:65536",
        "",
    ],
)
def test_a_gateways_url_that_would_show_the_key_is_refused_unseen(file: Path, url: str):
    """Plain text to another machine, or a password in it; the message shows none of it."""
    message = refusal(file, yaml.safe_dump({"gateway": {"url": url}}))
    assert message.startswith("config.yaml, line 2: gateway.url: must ")
    assert "hunter" not in message


@pytest.mark.parametrize(
    "key", ["mwk_" + "a" * 43, WORKER_KEY[:-1], WORKER_KEY.upper(), f"{WORKER_KEY} ", 7]
)
def test_a_key_that_is_no_workers_is_refused_unseen(file: Path, key: object):
    """The message says where one comes from."""
    message = refusal(file, yaml.safe_dump({"gateway": {"key": key}}))
    assert "gateway.key: " in message
    assert str(key).strip() not in message.replace("line 2", "")


def test_a_key_in_the_place_of_its_section_is_not_shown(file: Path):
    """A mistake that used to land in the log."""
    assert WORKER_KEY not in refusal(file, yaml.safe_dump({"gateway": WORKER_KEY}))


def test_no_way_of_printing_a_config_shows_the_workers_key():
    """As of the API's key."""
    config = load(None, {"MLX_WORKER_GATEWAY__KEY": WORKER_KEY})
    for text in (repr(config), str(config), config.model_dump_json(), str(config.model_dump())):
        assert "A-_z" not in text


# --- models -----------------------------------------------------------------------------------


def test_an_entry_of_the_example_file_is_one_at_its_defaults():
    """Once it isn't a comment any more."""
    lines = EXAMPLE.read_text().splitlines()
    start = lines.index("#   models:")
    entry = itertools.takewhile(lambda line: line.startswith("#   "), lines[start:])
    models = yaml.safe_load("\n".join(line[1:] for line in entry))["models"]
    config = Config.model_validate({"models": models})
    assert config.models == (ModelEntry(id="gemma-4-e2b"),)
    keys = [key for key in models[0] if key != "sampling"]
    assert [*keys, *(f"sampling.{key}" for key in models[0]["sampling"])] == entry_keys()


def test_models_can_be_given_as_a_variable(file: Path):
    """As YAML or JSON; the file's are not mixed with them."""
    file.write_text("models: [{id: a, draft: none}]\n")
    for text in (
        "[{id: b, preload: true}]",
        '[{"id": "b", "preload": true}]',
        "- id: b\n  preload: true",
    ):
        models = load(file, {"MLX_WORKER_MODELS": text}).models
        assert models == (ModelEntry(id="b", preload=True),)
    assert load(file, {"MLX_WORKER_MODELS": ""}).models == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models:\n- id: a\n- id: b\n  drat: none\n",
            "config.yaml, line 4: unknown key: models.1.drat. hint: did you mean models.1.draft?",
        ),
        (
            "models:\n- id: a\n  sampling:\n    temprature: 1\n",
            "config.yaml, line 4: unknown key: models.0.sampling.temprature. "
            "hint: did you mean models.0.sampling.temperature?",
        ),
        (
            "models:\n- id: a\n  sampling: {top_p: 3}\n",
            "config.yaml, line 3: models.0.sampling.top_p: 3, should be less than or equal to 1",
        ),
        (
            "models:\n- id: a\n  context_tokens: 0\n",
            "config.yaml, line 3: models.0.context_tokens: 0, should be greater than or equal to 1",
        ),
        ("models:\n- draft: none\n", "config.yaml, line 2: models.0.id: is missing"),
        (
            "models:\n- id: a\n  draft: x\n  draft: y\n",
            "config.yaml, line 4: models.0.draft: already set in line 3",
        ),
        (
            "models:\n- id: a\n- id: a\n",
            "config.yaml, line 3: models.1.id: 'a', must differ from that of models.0",
        ),
        (
            "models:\n- {id: a, preload: true}\n- {id: b, preload: true}\n",
            "config.yaml, line 1: models: 2 have preload: true, must be at most limits.loaded, "
            "which is 1. hint: raise limits.loaded to 2, or preload fewer",
        ),
    ],
)
def test_a_mistake_in_an_entry_is_named_with_its_line(file: Path, text: str, message: str):
    """By the entry's number, from 0, and the key in it."""
    assert refusal(file, text) == message


def test_a_mistake_in_a_variable_of_models_names_the_variable(file: Path):
    """Also where the file has models of its own."""
    text = "models:\n- id: a\n  draft: none\n"
    assert refusal(file, text, {"MLX_WORKER_MODELS": "[{id: b, draft: 3}]"}) == (
        "MLX_WORKER_MODELS: models.0.draft: 3, should be a valid string"
    )
    assert refusal(file, text, {"MLX_WORKER_MODELS": "[{"}) == (
        "MLX_WORKER_MODELS: models: '[{', must be a list in YAML or JSON"
    )
    assert refusal(file, text, {"MLX_WORKER_MODEL__ID": "a"}) == (
        "MLX_WORKER_MODEL__ID: unknown key: model. hint: did you mean models?"
    )


def accepts(key: str, value: float) -> bool:
    try:
        SamplingSection.model_validate({key: value})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("key", [key.partition(".")[2] for key in entry_keys() if "." in key])
def test_the_ranges_of_sampling_are_those_of_a_request(key: str):
    """So that nothing is configured that every request would be refused with."""
    whole = [-3, -2, -1, 0, 1, 2, 3, 99, 100, 101]
    fractions = [-2.1, -0.5, 1e-7, 1e-6, 0.009, 0.01, 0.5, 1.1, 2.1, 100.1, math.nan, math.inf]
    for value in whole if key == "top_k" else [*whole, *fractions]:
        try:
            check_sampling(replace(Sampling(), **{key: value}), 8)
        except InvalidParameter:
            assert not accepts(key, value), value
        else:
            assert accepts(key, value), value


def test_sections_are_frozen():
    """Nobody changes a setting in place; overriding builds a new Config."""
    with pytest.raises(ValueError, match="frozen"):
        Config().server.port = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_link_to_a_file_that_isnt_there_is_no_missing_file(home: Path):
    """What it says, a key for instance, isn't to be done without."""
    folder().mkdir(exist_ok=True)
    (folder() / "config.yaml").symlink_to("gone.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml: No such file or directory"):
        load()


def test_a_folder_of_nobody_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Instead of one that is called ~nobody."""
    monkeypatch.setenv("MLX_WORKER_HOME", "~no-such-user/x")
    with pytest.raises(ConfigError, match="MLX_WORKER_HOME: '~no-such-user/x': there is no such"):
        folder()
