"""A model's published draft against a quantised copy of it: which of them is faster here.

Owns the comparison, the rule that chooses, and how both are shown. Leaves serving to run.py and
remembering the choice to models/smaller.py. Runs on the thread that owns MLX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from mlx_worker.bench import facts, report, run
from mlx_worker.bench.facts import Machine
from mlx_worker.bench.run import OFF, Arm, Batch, Limits, Row, Served
from mlx_worker.bench.workloads import ALL, Prompt
from mlx_worker.control.decide import (
    Estimate,
    Verdict,
    estimate_speedup,
    held_out_ratios,
    shows_gain,
)
from mlx_worker.engine.draft import Position
from mlx_worker.engine.load import load_pair
from mlx_worker.engine.quantize import (
    QuantizedCopy,
    check_quantization as check_quantization,
    quantize_assistant as quantize_assistant,
)
from mlx_worker.tables import DASH, number, percent

PUBLISHED, SMALLER = "assistant", "smaller"  # modes of the two drafts' arms


@dataclass(frozen=True)
class Comparison:
    """Plain decoding and both drafts over one batch.

    machine       as it was when serving began
    plain         its row over all requests
    rows          mode → the draft's row at its best depth
    verdicts      mode → the draft against plain decoding
    gain          of the copy over the published draft, each request with the depths that the
                  others favour, with the 90 % interval
    """

    machine: Machine
    served: Sequence[Served]
    plain: Row
    rows: Mapping[str, Row]
    verdicts: Mapping[str, Verdict]
    gain: Estimate

    @property
    def is_smaller_faster(self) -> bool:
        return shows_gain(self.gain)


def prepare(
    model: str,
    published: str,
    smaller: str,
    prompts: Sequence[Prompt],
    limits: Limits,
    position: Position = "last_cached",
) -> Batch:
    """Load a model with both drafts, and decide who meets whom: off, and each at every depth.

    Raises ModelError, and ConfigError for too few requests. Next: measure.
    """
    loaded = load_pair(model, published, position=position)
    pairs = {
        "off": loaded.with_draft("none"),
        PUBLISHED: loaded,
        SMALLER: loaded.with_draft(smaller),
    }
    arms = run.arms_of(list(pairs), run.DEPTHS)
    return Batch(loaded, pairs, arms, run.requests_of(loaded, prompts, len(arms)), limits)


def measure(batch: Batch) -> Comparison | None:
    """Serve the batch, with a bar on standard error; None: no reply was long enough to tell."""
    machine = facts.machine()
    with report.progress(batch.n_replies) as on_reply:
        return compare(machine, run.serve(batch, on_reply))


def compare(machine: Machine, served: Sequence[Served]) -> Comparison | None:
    gain = gain_of(served)
    verdicts = {mode: run.verdict_of(served, mode) for mode in (PUBLISHED, SMALLER)}
    known = {mode: verdict for mode, verdict in verdicts.items() if verdict}
    if gain is None or len(known) < len(verdicts):
        return None
    rows = {mode: run.row_of(Arm(mode, each.depth), ALL, served) for mode, each in known.items()}
    return Comparison(machine, served, run.row_of(OFF, ALL, served), rows, known, gain)


def gain_of(served: Sequence[Served]) -> Estimate | None:
    """The copy's speed over the published draft's, from each prompt's own ratio of times."""
    arms = [arm for arm in served[0].replies if arm.depth]
    prompts = run.ratios_by_prompt(served, arms)
    if not prompts:
        return None

    def ratios(mode: str) -> list[float]:
        own = [arm for arm in arms if arm.mode == mode]
        return held_out_ratios([{arm.depth: each[arm] for arm in own} for each in prompts])

    pairs = zip(ratios(SMALLER), ratios(PUBLISHED), strict=True)
    return estimate_speedup([smaller / published for smaller, published in pairs])


# --- for a reader -----------------------------------------------------------------------------


def copy_line(copy: QuantizedCopy) -> str:
    """What was quantised, and what was not."""
    sizes = f"{report.size(copy.before_bytes)} of weights became {report.size(copy.n_bytes)}"
    line = f"{copy.n_layers} layers at {copy.bits} bits, groups of {copy.group_size}: {sizes}"
    if copy.left:
        names = ", ".join(copy.left[:3]) + (", …" if len(copy.left) > 3 else "")
        line += f"; {len(copy.left)} stay as they are, their width not divisible: {names}"
    return line


def print_comparison(out: Console, batch: Batch, found: Comparison, bits: int) -> None:
    """Plain and both drafts, each at its best depth, and whether texts were the same."""
    out.print(report.card(report.machine_lines(found.machine)))
    title = f"Both drafts at their best depths, {len(found.served)} requests, median tok/s"
    report.print_table(out, title, table(batch, found, bits))
    out.print(report.same_text_line(found.served, batch.limits), soft_wrap=True)


def table(batch: Batch, found: Comparison, bits: int) -> Table:
    drawn = report.new_table()
    for name in ("draft", "weights", "depth", "tok/s", "speed-up", "90% interval", "accept"):
        drawn.add_column(name, justify="left" if name == "draft" else "right", no_wrap=True)
    drawn.add_row("none", DASH, DASH, number(found.plain.tokens_per_s), DASH, DASH, DASH)
    for mode, name in ((PUBLISHED, "published"), (SMALLER, f"{bits}-bit copy")):
        row, estimate = found.rows[mode], found.verdicts[mode].estimate
        drawn.add_row(
            name,
            report.size(batch.pairs[mode].draft_bytes),
            str(row.arm.depth),
            number(row.tokens_per_s),
            percent(estimate.speedup),
            report.interval(estimate),
            number(row.acceptance, 2),
        )
    return drawn


def choice_line(found: Comparison | None, bits: int) -> str:
    """`chosen: …` or `kept, not chosen: …`, with the figures."""
    copy = f"the {bits}-bit copy"
    if found is None:
        return f"kept, not chosen: {copy}; every reply was a single token, which has no speed"
    gain = found.gain
    figures = f"{percent(gain.speedup)} over the published draft"
    figures += f", 90% interval {report.interval(gain)}"
    if found.is_smaller_faster:
        return f"chosen: {copy}, {figures}"
    unsure = ", so not shown to be faster" if gain.speedup > 0 else ""
    return f"kept, not chosen: {copy}, {figures}{unsure}"


# --- for a program ----------------------------------------------------------------------------


def copy_json(copy: QuantizedCopy) -> dict[str, Any]:
    return {**vars(copy), "folder": str(copy.folder), "left": list(copy.left)}


def as_json(batch: Batch, found: Comparison | None) -> dict[str, Any]:
    """The comparison as plain values; speed-ups are fractions, gain is the copy's over the other's.

    found None: nothing could be compared, so what it showed is null.
    """
    settings = dict(vars(batch.limits))
    if found is None:
        return {"settings": settings, "plain": None, "drafts": None, "gain": None}
    return {
        "machine": {**vars(found.machine), "versions": dict(found.machine.versions)},
        "settings": settings,
        "requests": len(found.served),
        "same_text": sum(one.same_text for one in found.served),
        "plain": report.row_json(found.plain),
        "drafts": {
            mode: {
                **report.row_json(row),
                "draft_bytes": batch.pairs[mode].draft_bytes,
                "verdict": report.verdict_json(mode, found.verdicts[mode]),
            }
            for mode, row in found.rows.items()
        },
        "gain": vars(found.gain),
    }
