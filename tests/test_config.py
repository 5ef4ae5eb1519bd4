"""What config.yaml, the environment and the flags set, and how mistakes in them are explained."""

import itertools
from pathlib import Path

import pytest
import yaml

from mlx_worker.config import Config, home as folder, known_keys, load, override
from mlx_worker.errors import ConfigError

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
    assert [f"{name}.{key}" for name in sections for key in sections[name]] == known_keys()
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
    (home / ".mlx-worker" / "config.yaml").write_text("model: {id: some/model}\n")
    assert load(environ={}).model.id == "some/model"


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
    file.write_text("model:\n  # id: x\n")
    assert load(file, {}) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {id: x}\nspeculation:\n  depht: 3\n",
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
            "model:\n  draft: a\n  draft: b\n",
            "config.yaml, line 3: model.draft: already set in line 2",
        ),
        (
            "model:\n  id: [1\nx: 2\n",
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
    file.write_bytes(b"model: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 7"):
        load(file, {})


def test_sections_are_frozen():
    """Nobody changes a setting in place; overriding builds a new Config."""
    with pytest.raises(ValueError, match="frozen"):
        Config().model.draft = "none"  # pyright: ignore[reportAttributeAccessIssue]
