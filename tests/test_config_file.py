"""One setting changes in config.yaml, and not a byte of anything else."""

import stat
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from mlx_worker import config_file
from mlx_worker.config import load
from mlx_worker.errors import ConfigError

EXAMPLE = Path(__file__).parent.parent / "config.example.yaml"
ENTRY = "org/a.b:4bit"


@pytest.fixture
def file(home: Path) -> Path:
    return home / ".mlx-worker" / "config.yaml"


def after(file: Path, text: str, key: str, value: str | None) -> str:
    """What the file is once this key is set in it; None: unset."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text.encode())
    if value is None:
        config_file.unset(file, key)
    else:
        config_file.set(file, key, value)
    load(file, {})
    return file.read_bytes().decode()


CHANGES = {
    "no text": ("", "server.port", "9000", "server:\n  port: 9000\n"),
    "comments alone": ("# mine\n", "server.port", "9000", "# mine\nserver:\n  port: 9000\n"),
    "a value with a comment": (
        "server:   # s\n    port: 1  # p\tq\n\n    # h\n    host: 'a'\n",
        "server.port", "9000",
        "server:   # s\n    port: 9000  # p\tq\n\n    # h\n    host: 'a'\n",
    ),
    "a new key behind its section's last": (
        "server:\n    host: a  # h\n\n# next\nlimits: {}\n",
        "server.port", "9000",
        "server:\n    host: a  # h\n    port: 9000\n\n# next\nlimits: {}\n",
    ),
    "a section without keys": (
        "server: # s\n  # port: 1\nlimits: {}\n",
        "server.port", "9000",
        "server: # s\n  port: 9000\n  # port: 1\nlimits: {}\n",
    ),
    "a section that is null": ("server: ~ # s\n", "server.port", "1", "server: {port: 1} # s\n"),
    "a key without a value": ("server:\n  port:\n", "server.port", "1", "server:\n  port: 1\n"),
    "no newline at the end": (
        "server:\n  host: a", "server.port", "1", "server:\n  host: a\n  port: 1"
    ),
    "lines as Windows ends them": (
        "server:\r\n  host: a # h\r\nlimits: {}\r\n",
        "server.port", "1",
        "server:\r\n  host: a # h\r\n  port: 1\r\nlimits: {}\r\n",
    ),
    "a section in braces": (
        "speculation: { mode: off, depth: 2 } # s\n",
        "speculation.depth", "3",
        "speculation: { mode: off, depth: 3 } # s\n",
    ),
    "a new key in braces": (
        "speculation: {\n  mode: off, # m\n  }\n",
        "speculation.depth", "3",
        "speculation: {\n  mode: off, depth: 3, # m\n  }\n",
    ),
    "a whole file in braces": ("{server: {}}\n", "limits.loaded", "2",
                               "{server: {}, limits: {loaded: 2}}\n"),
    "a word that YAML might misread": (
        "models: []\n", "models.true.draft", '"null"', "models: [{id: 'true', draft: 'null'}]\n"
    ),
    "a list over lines": (
        "server:\n  allowed_hosts: # h\n    - a\n    - b\n  # p\n  port: 1\n",
        "server.allowed_hosts", "[c, 'd:1']",
        "server:\n  allowed_hosts: [c, 'd:1'] # h\n  # p\n  port: 1\n",
    ),
    "all models": ("models: [] # m\n", "models", "- id: a\n  draft: none",
                   "models: [{id: a, draft: none}] # m\n"),
    "the first entry": (
        "# m\n", f"models.{ENTRY}.sampling.top_k", "4",
        f"# m\nmodels:\n  - id: '{ENTRY}'\n    sampling:\n      top_k: 4\n",
    ),
    "the first entry of a list without any": (
        "models: # m\n  # - id: x\nserver: {}\n", "models.a.draft", "none",
        "models: # m\n  - id: a\n    draft: none\n  # - id: x\nserver: {}\n",
    ),
    "the first entry of a list that is null": (
        "models: ~ # m\n", "models.a.draft", "none", "models: [{id: a, draft: none}] # m\n"
    ),
    "the first entry in a file in braces": (
        "{server: {}}\n", "models.a.draft", "none",
        "{server: {}, models: [{id: a, draft: none}]}\n",
    ),
    "an entry in brackets": (
        "models: [{id: b}] # m\n", f"models.{ENTRY}.draft", "none",
        f"models: [{{id: b}}, {{id: '{ENTRY}', draft: none}}] # m\n",
    ),
    "one more entry": (
        "models:\n- draft: none # d\n  id: b\n# s\nserver: {}\n",
        f"models.{ENTRY}.preload", "true",
        f"models:\n- draft: none # d\n  id: b\n- id: '{ENTRY}'\n  preload: true\n"
        "# s\nserver: {}\n",
    ),
    "a key of an entry": (
        f"models:\n  - id: b\n  - id: {ENTRY} # me\n    draft: none # d\n  - id: c\n",
        f"models.{ENTRY}.draft", "lookup",
        f"models:\n  - id: b\n  - id: {ENTRY} # me\n    draft: lookup # d\n  - id: c\n",
    ),
    "a new key of an entry": (
        "models:\n  - id: a # me\n    sampling:\n      top_k: 3 # k\n  - id: c\n",
        "models.a.sampling.min_p", "0.1",
        "models:\n  - id: a # me\n    sampling:\n      top_k: 3 # k\n      min_p: 0.1\n  - id: c\n",
    ),
    "out of a section": (
        "server:\n  host: a # h\n  port: 1 # p\n  # k\n", "server.port", None,
        "server:\n  host: a # h\n  # k\n",
    ),
    "the only one out of a section": ("server:\n  port: 1\nlimits: {}\n", "server.port", None,
                                      "server:\nlimits: {}\n"),
    "the first out of braces": ("server: {port: 1, host: a}\n", "server.port", None,
                                "server: {host: a}\n"),
    "the last out of braces": ("server: {host: a, port: 1}\n", "server.port", None,
                               "server: {host: a}\n"),
    "the first of an entry": ("models:\n- draft: none\n  id: a\n", "models.a.draft", None,
                              "models:\n- id: a\n"),
    "what isn't there": ("server: {}\n", "models.a.draft", None, "server: {}\n"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "key", "value", "expected"), CHANGES.values(), ids=CHANGES)
def test_one_setting_changes_and_nothing_else(
    file: Path, text: str, key: str, value: str | None, expected: str
):
    """Comments, order, quotes, blank lines and line ends are as they were."""
    assert after(file, text, key, value) == expected


VALUES: dict[str, st.SearchStrategy[str]] = {
    "server.port": st.integers(0, 65535).map(str),
    "server.host": st.sampled_from(["localhost", "'::1'", "0.0.0.0"]),
    "server.allowed_hosts": st.sampled_from(["[]", "[a, 'b:1']", "- a\n- b"]),
    "limits.memory_gb": st.sampled_from(["null", "1.5", "64"]),
    "limits.loaded": st.integers(1, 9).map(str),
    "speculation.mode": st.sampled_from(["off", "on", "auto"]),
    "generation.max_tokens": st.integers(1, 9999).map(str),
    "models.a.draft": st.sampled_from(["none", "lookup", "'x: y # z'", "org/b:4bit"]),
    "models.a.context_tokens": st.integers(1, 9999).map(str),
    f"models.{ENTRY}.sampling.temperature": st.sampled_from(["0", "0.5", "null"]),
    f"models.{ENTRY}.preload": st.sampled_from(["false", "null"]),
}
LINES = [
    "# top", "", "models: # m", "  - id: a # one", "    draft: none # d", "", "    # inside",
    f"  - id: {ENTRY}", "    sampling: # s", "      top_k: 3   # k", "# between",
    "speculation: {mode: auto, depth: 2} # braces", "server: # sv", "    # port: 1", "limits:",
    "  waiting: 3 # w", "  # end of limits", "", "# end",
]  # fmt: skip


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, str | None]:
    key = draw(st.sampled_from(sorted(VALUES)))
    return key, draw(st.one_of(st.none(), VALUES[key]))


def values_but(file: Path, key: str) -> Any:
    """Everything the file sets, but this key."""
    values: Any = load(file, {}).model_dump()
    entries = {entry.pop("id"): entry for entry in values.pop("models")}
    values["models"] = entries
    for id in ("a", ENTRY):
        entries.setdefault(id, load_entry())
    *path, last = config_file.keys_of(key)
    inner = values
    for part in path:
        inner = inner[part]
    del inner[last]
    return values


def load_entry() -> dict[str, Any]:
    from mlx_worker.config import ModelEntry

    return ModelEntry(id="x").model_dump(exclude={"id"})


ANY_CHANGES = given(
    asked=st.lists(changes(), min_size=1, max_size=5),
    end=st.sampled_from(["\n", "\r\n"]),
    has_last=st.booleans(),
)


def check_the_rest_stays(
    tmp_path_factory: pytest.TempPathFactory,
    asked: list[tuple[str, str | None]],
    end: str,
    has_last: bool,
):
    """Every comment, in its order, and every line that doesn't set the key."""
    file = tmp_path_factory.mktemp("c") / "config.yaml"
    file.write_bytes((end.join(LINES) + (end if has_last else "")).encode())
    for key, value in asked:
        before, text = values_but(file, key), file.read_bytes().decode()
        (config_file.unset(file, key) if value is None else config_file.set(file, key, value))
        assert values_but(file, key) == before
        new = file.read_bytes().decode()
        gone = [line for line in text.split(end) if line not in new.split(end)]
        assert len(gone) <= (1 if "allowed_hosts" not in key else 3)
        name = key.rpartition(".")[2]
        assert all(name in line or "{" in line for line in gone)
        kept = [line for line in text.split(end) if line in new.split(end)]
        came = iter(new.split(end))
        assert all(line in came for line in kept), "lines are in another order"
        assert ("\n" in new.replace(end, "")) is False


@settings(max_examples=40, deadline=None)
@ANY_CHANGES
def test_whatever_is_set_every_other_line_and_value_stays(
    tmp_path_factory: pytest.TempPathFactory, **drawn: Any
):
    """Whichever keys, in whichever order."""
    check_the_rest_stays(tmp_path_factory, **drawn)


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@ANY_CHANGES
def test_whatever_is_set_a_thousand_times_the_rest_stays(
    tmp_path_factory: pytest.TempPathFactory, **drawn: Any
):
    """The same, many more."""
    check_the_rest_stays(tmp_path_factory, **drawn)


def test_every_key_of_the_example_can_be_set_and_unset(file: Path):
    """From its comment-rich text."""
    example = EXAMPLE.read_text()
    sections = yaml.safe_load(example)
    del sections["models"], sections["server"]["api_key"], sections["gateway"]["key"]
    keys = chain(*([(f"{s}.{k}", v) for k, v in sections[s].items()] for s in sections))
    for key, value in keys:
        given = yaml.safe_dump(value).removesuffix("...\n").strip()
        assert after(file, example, key, given).count("\n") == example.count("\n")
        assert after(file, example, key, None).count("\n") == example.count("\n") - 1


REFUSED = [
    ("server.prot", "1", "unknown key: server.prot. hint: did you mean server.port?"),
    ("server", "{}", "server: is a section, not a key. hint: name one of it, as in server.host"),
    ("models.a.drat", "x", "unknown key: models.a.drat. hint: did you mean models.ID.draft?"),
    ("models.a.id", "x", "unknown key: models.a.id"),
    ("models.draft", "x", "unknown key: models.draft"),
    ("server.port", "70000", "server.port: 70000, should be less than or equal to 65535"),
    ("server.port", "[1", "server.port: '[1', must be YAML"),
    ("models.b.preload", "true", "models: 2 have preload: true"),
    ("models.b.context_tokens", "0", "models.1.context_tokens: 0, should be greater"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_what_can_not_be_set_leaves_the_file(file: Path, key: str, value: str, message: str):
    """With the message that the whole file would be refused with."""
    text = "models: [{id: a, preload: true}]\n"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        config_file.set(file, key, value)
    assert message in str(refused.value)
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"server: \xff\n", "not UTF-8"),
        (b"server: [\n", "line 2"),
        (b"- a\n", "must be sections with keys"),
        (b"server: &s {}\nlimits: *s\n", "change it by hand"),
        (b"server: {}\n...\n", "change it by hand"),
    ],
)
def test_a_file_that_can_not_be_changed_safely_is_left(file: Path, content: bytes, message: str):
    """It is someone's; what they meant isn't guessed."""
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        config_file.set(file, "limits.loaded", "2")
    assert file.read_bytes() == content


def test_a_bad_value_can_be_mended(file: Path):
    """The whole file is checked as it will be."""
    assert after(file, "server: {port: 70000}\n", "server.port", "7") == "server: {port: 7}\n"


def test_a_new_file_is_ones_own(file: Path):
    """It may come to hold a key; an existing one keeps its mode."""
    config_file.set(file, "server.port", "9000")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    config_file.set(file, "server.port", "9001")
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_secret_is_taken_as_it_is(file: Path):
    """Digits, colons and hashes in it are no YAML."""
    for key in ("1234567890", "abc:def#", "null-null", "'quoted'#1", "[{&*a:bb"):
        config_file.set(file, "server.api_key", key)
        found = load(file, {}).server.api_key
        assert found is not None
        assert found.get_secret_value() == key


def test_unsetting_in_no_file_makes_none(file: Path):
    """There is nothing to take out."""
    config_file.unset(file, "server.port")
    assert not file.exists()
