"""What a reader sees and what a program gets, from figures written by hand."""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from mlx_worker.bench import report, run
from mlx_worker.bench.facts import Costs, Facts, Machine
from mlx_worker.bench.run import OFF, Arm, Batch, Limits, Served
from tests.bench.replies import reply, served
from tests.tiny import tiny_pair

MACHINE = Machine("Linux", "AMD EPYC", 2, 24 * 2**30, 0.5, "cpu", None, {"mlx": "0.32.4"})
COSTS = Costs(dict.fromkeys(range(1, 10), 9.5), {"assistant": 1.5}, 18_000_000, 2.0)
FACTS = Facts(MACHINE, COSTS)


def batch_of(replies: Sequence[Served], limits: Limits | None = None) -> Batch:
    loaded = tiny_pair(draft="assistant")
    pairs = run.pairs_of(loaded, None)
    requests = [one.request for one in replies]
    return Batch(loaded, pairs, list(replies[0].replies), requests, limits or Limits())


FASTER = [served(i, 10.0, {1: 9.0, 2: 8.0 + i / 10}) for i in range(3)]
SLOWER = [served(i, 10.0, {1: 12.5, 2: 14.0 + i / 10}) for i in range(3)]


def printed(replies: Sequence[Served], limits: Limits | None = None, width: int = 80) -> str:
    """Everything the bench prints before its JSON line, as a pipe gets it."""
    out = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    batch = batch_of(replies, limits)
    report.print_facts(out, batch, FACTS)
    report.print_result(out, batch, run.conclude(batch, replies))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def as_json(replies: Sequence[Served], limits: Limits | None = None) -> dict:
    batch = batch_of(replies, limits)
    line = json.dumps(report.as_json(batch, FACTS, run.conclude(batch, replies)), allow_nan=False)
    return json.loads(line)


# --- for a reader -----------------------------------------------------------------------------


def test_facts_come_first_and_the_verdict_last():
    """As a reader needs them: what it depends on, the figures, the conclusion."""
    lines = printed(FASTER).strip().splitlines()
    assert lines[0].startswith("machine    AMD EPYC, 2 cores, 24 GiB memory")
    assert lines[-1].startswith(
        "Verdict   On, +23%   (assistant, depth 2: +23.5%, 90% interval +20"
    )


@pytest.mark.parametrize("width", [80, 100])
def test_nothing_but_closing_lines_is_wider_than_the_console(width: int):
    """No table wraps, whatever its figures; no colour codes in a pipe."""
    wild = [served(0, 10.0, {1: 300.0, 2: 0.9}), served(1, 10.0, {1: 1.0, 2: 999.0})]
    text = printed(
        [*wild, served(2, 1234.5, {1: 1.0, 2: 1.0}, workload="mathematics")], width=width
    )
    body = text[: text.index("\nVerdict")].splitlines()
    assert max(len(line.rstrip()) for line in body) <= width
    assert "…" not in text
    assert "\x1b" not in text


def test_medians_stand_beside_their_range_and_interval():
    """Depth 2: 8.0, 8.1 and 8.2 ms a token against 10."""
    line = next(line for line in printed(FASTER).splitlines() if line.startswith("    2  all"))
    assert line.split() == "2 all 123.5 122–125 +23.5% +20.9 to +26.1% 0.38 1.75".split()


def test_a_slower_draft_is_shown_with_its_cost():
    """The minus sign is the typographic one everywhere."""
    text = printed(SLOWER)
    assert "Verdict   Off, −20%   (assistant, depth 1: −20.0%" in text
    assert " -" not in text


def test_the_trade_counts_passes_and_drafted_ids():
    """Three requests, eleven plain passes each against five; 8 drafted and 3 kept in each."""
    text = printed(FASTER)
    assert "saves 18 of 33 passes over the target's weights (−54.5%)" in text
    assert "throws away 15 of 24 drafted ids" in text
    assert "of draft weights" in text


def test_texts_that_differ_are_called_out():
    """A difference under the coupled rule is a fault, and must not be overlooked."""
    wrong = {**FASTER[0].replies, Arm("assistant", 1): reply(9.0, ids=tuple(range(1, 12)))}
    text = printed([Served(FASTER[0].request, wrong), *FASTER[1:]])
    assert "Same text in every arm: 2 of 3 requests." in text
    assert " NO\n" in text


def test_under_the_standard_rule_texts_are_not_compared_and_the_reason_is_given():
    """The two rules draw different noise; null in the JSON."""
    limits = Limits(temperature=0.8, acceptance="standard")
    assert "Texts are not compared: the standard rule draws" in printed(FASTER, limits)
    assert [one["same_text"] for one in as_json(FASTER, limits)["requests"]] == [None] * 3


def test_a_verdict_over_different_depths_says_so():
    """Its figure is then not the one that the table shows for its depth."""
    split = [served(i, 10.0, {1: a, 2: b}) for i, (a, b) in enumerate([(8, 9), (9, 7.5), (8, 8.1)])]
    assert "Requests favour different depths" in printed(split)
    assert "Requests favour different depths" not in printed(FASTER)


def test_a_model_without_a_draft_says_why_there_is_no_verdict():
    """The reason that the loader gave."""
    loaded = replace(tiny_pair(), draft_problem="vocab_size: target has 272, draft has 300")
    alone = [Served(one.request, {OFF: one.off}) for one in FASTER]
    batch = Batch(loaded, run.pairs_of(loaded, None), [OFF], [], Limits())
    out = Console(file=io.StringIO(), width=80)
    report.print_result(out, batch, run.conclude(batch, alone))
    assert isinstance(out.file, io.StringIO)
    assert "Verdict   none: vocab_size: target has 272" in out.file.getvalue()


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(512, "512 bytes"), (1280, "1.3 kB"), (18_328_544, "18.3 MB"), (5.1e9, "5.1 GB")],
)
def test_sizes_use_powers_of_ten(n_bytes: float, text: str):
    """As makers of memory and disks count."""
    assert report.size(n_bytes) == text


# --- for a program ----------------------------------------------------------------------------


def test_the_json_has_every_promised_key():
    """The contract of the last line."""
    result = as_json(FASTER)
    assert result.keys() >= {"machine", "model", "draft", "modes", "requests", "verdict", "work"}
    assert result["modes"][0].keys() >= {
        "mode", "depth", "workload", "tokens_per_second", "speedup", "low", "high", "acceptance",
        "tokens_per_round",
    }  # fmt: skip
    assert result["requests"][0].keys() >= {
        "workload", "prompt_tokens", "output_tokens", "off", "on", "latency_change", "same_text",
    }  # fmt: skip
    assert result["verdict"].keys() >= {"text", "speedup", "low", "high", "depth"}


def test_on_is_the_verdicts_depth():
    """Depth 2 here: 80 ms of decoding after 100 ms, against 100 after 100."""
    first = as_json(FASTER)["requests"][0]
    assert first["off"] == {"latency_s": pytest.approx(0.2), "tokens_per_second": 100.0}
    assert first["on"] == {"latency_s": pytest.approx(0.18), "tokens_per_second": 125.0}
    assert first["latency_change"] == pytest.approx(-0.1)
    assert first["same_text"] is True


def test_speedups_in_the_json_are_fractions_and_agree_with_the_text():
    """0.23, not 23; the row of the verdict's depth has the verdict's figure."""
    result = as_json(FASTER)
    verdict = result["verdict"]
    assert verdict["text"] == "On, +23%"
    assert 0.2 < verdict["low"] < verdict["speedup"] < verdict["high"] < 0.3
    row = next(row for row in result["modes"] if (row["depth"], row["workload"]) == (2, "all"))
    assert row["speedup"] == pytest.approx(verdict["speedup"])


def test_the_brief_travels_with_its_digest():
    """Whoever reads the file can tell which work it records."""
    work = as_json(FASTER)["work"]
    assert work["class"] == "data processing"
    assert work["sha256"] == hashlib.sha256(work["brief"].encode()).hexdigest()
    assert work["sha256"].startswith("70eaafd5a79b7e00")


def test_what_cannot_be_known_is_null():
    """One request a workload has no interval; off drafts nothing."""
    modes = as_json([served(0, 10.0, {2: 8.0}), served(1, 10.0, {2: 8.0}, workload="json")])[
        "modes"
    ]
    chat = next(row for row in modes if (row["depth"], row["workload"]) == (2, "chat"))
    assert (chat["speedup"], chat["low"], chat["high"]) == (pytest.approx(0.25), None, None)
    off = next(row for row in modes if row["mode"] == "off")
    assert (off["acceptance"], off["tokens_per_round"]) == (None, None)
