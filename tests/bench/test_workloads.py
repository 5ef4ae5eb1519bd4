"""The built-in prompts, and prompts from a file."""

from pathlib import Path

import pytest

from mlx_worker.bench import workloads
from mlx_worker.errors import ConfigError

LINE = '{"workload": "mail", "messages": [{"role": "user", "content": "Hi"}]}'


def write(folder: Path, text: str) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_six_workloads_have_ten_different_prompts_each():
    """So that ten requests of each rest on sixty different prompts."""
    prompts = workloads.BUILT_IN
    assert workloads.names(prompts) == ["chat", "code", "json", "edit", "count", "story"]
    assert len(prompts) == len(set(map(repr, prompts))) == 60


def test_texts_to_edit_are_thirty_to_ninety_words():
    """Long enough that copying dominates."""
    texts = [str(prompt.messages[0]["content"]) for prompt in workloads.EDIT]
    assert all(30 <= len(text.partition("\n")[2].split()) <= 90 for text in texts)


def test_so_many_of_each_workload_are_picked_in_the_order_asked():
    """--requests counts per workload."""
    picked = workloads.pick(workloads.BUILT_IN, ["json", "chat"], 2)
    assert picked == [*workloads.JSON[:2], *workloads.CHAT[:2]]
    assert not workloads.repeats(picked)


def test_a_workload_with_too_few_prompts_starts_again():
    """The number of requests is what was asked for, and the repetition is noticed."""
    picked = workloads.pick(workloads.BUILT_IN, ["count"], 12)
    assert picked[10:] == list(workloads.COUNT[:2])
    assert workloads.repeats(picked)


def test_an_unknown_workload_is_refused_with_the_known_ones():
    """The message names the flag, the value and the choice."""
    with pytest.raises(ConfigError, match=r"--workloads: no prompts for 'chess'.*chat, code"):
        workloads.pick(workloads.BUILT_IN, ["chess"], 3)


def test_prompts_are_read_from_a_file_line_by_line(tmp_path: Path):
    """Blank lines are skipped; a line separator inside a text doesn't end the line."""
    other = LINE.replace("mail", "note").replace("Hi", "a\u2028b")
    file = write(tmp_path, f"{LINE}\n\n{other}\n")
    mail, note = workloads.read(file)
    assert (mail.workload, note.workload) == ("mail", "note")
    assert note.messages == ({"role": "user", "content": "a\u2028b"},)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not JSON"),
        ("[]", r'line 2: must be an object with "workload" and "messages"'),
        ('{"messages": []}', r"line 2: workload: None, must be a name"),
        (LINE.replace('"mail"', '"all"'), r"line 2: workload: 'all' is the name of the totals"),
        ('{"workload": "a"}', r"line 2: messages: None, must be a list"),
        ('{"workload": "a", "messages": []}', r"line 2: messages: \[\], must be a list"),
        ('{"workload": "a", "messages": ["x"]}', r"line 2: messages\[0\]: 'x', must be an object"),
        (LINE.replace('"Hi"', "3"), r"line 2: messages\[0\].content: 3, must be a string"),
        (LINE.replace('"workload"', '"kind"'), r"line 2: unknown key 'kind'"),
    ],
)
def test_a_bad_line_is_named_with_file_and_line(tmp_path: Path, line: str, message: str):
    """Every way a line can be wrong."""
    file = write(tmp_path, f"{LINE}\n{line}\n")
    with pytest.raises(ConfigError, match=f"prompts.jsonl, {message}"):
        workloads.read(file)


def test_a_file_that_is_missing_empty_or_not_text_is_refused(tmp_path: Path):
    """With its name and the reason."""
    with pytest.raises(ConfigError, match=r"nowhere.jsonl: No such file"):
        workloads.read(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"prompts.jsonl: has no prompts"):
        workloads.read(write(tmp_path, "\n\n"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes.jsonl: not UTF-8 at byte 0"):
        workloads.read(tmp_path / "bytes.jsonl")


def test_a_prompt_file_is_served_whole_unless_told_otherwise():
    """Only the first three prompts of a workload used to be served, without a word."""
    mine = [workloads.Prompt("mine", ({"role": "user", "content": str(i)},)) for i in range(5)]
    assert workloads.choose(mine, None, None) == mine
    assert workloads.choose(mine, ["mine"], 2) == mine[:2]
    assert len(workloads.choose(None, ["chat"], None)) == workloads.N_EACH
