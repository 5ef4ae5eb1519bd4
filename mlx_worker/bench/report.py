"""Show a bench: facts, tables and verdict for a reader, one JSON object for a program.

Owns layout and the JSON's keys. Leaves every number to facts.py and run.py. Writes only to the
consoles it is given; any thread.

A figure that can't be known is null in JSON.
"""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mlx_worker.bench.facts import Costs, Facts, Machine
from mlx_worker.bench.live import Comparison, LiveReply
from mlx_worker.bench.run import AUTO, OFF, Arm, Batch, Limits, Result, Row, Served, Trade
from mlx_worker.bench.workloads import ALL
from mlx_worker.control.decide import Estimate, Verdict
from mlx_worker.engine.load import LoadedPair
from mlx_worker.tables import DASH, number, percent, span

BRIEF = (
    "Serve a batch of requests through a draft-and-verify decoding path and record the change in "
    "latency per request."
)
BRIEF_CLASS = "data processing"
MAX_REQUEST_ROWS = 60
SAME_SPEEDUP = 5e-4  # below this, two figures print alike


@contextmanager
def progress(total: int):
    """A bar on standard error if that is a terminal; yields the function to call at each step."""
    talk = Console(file=sys.stderr)
    columns = (TextColumn("replies"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as bar:
        task = bar.add_task("replies", total=total)
        yield lambda: bar.advance(task)


# --- words ------------------------------------------------------------------------------------


def interval(estimate: Estimate | None) -> str:
    return DASH if estimate is None else span(estimate.low, estimate.high)


def size(n_bytes: float) -> str:
    """1.5 GB, 23.4 MB, 512 bytes: powers of ten, as makers of memory and disks count."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:,.1f} {unit}"
    return f"{n_bytes:,.0f} bytes"


def arm_name(arm: Arm) -> str:
    return f"{arm.mode}, depth {arm.depth}" if arm.depth else arm.mode


# --- for a reader -----------------------------------------------------------------------------


def print_facts(out: Console, batch: Batch, facts: Facts) -> None:
    """The card of facts, and the costs: what the figures below depend on."""
    lines = [*machine_lines(facts.machine), *pair_lines(batch.pairs), read_line(facts.costs)]
    out.print(card(lines))
    print_table(
        out, "Cost of a verify pass by rows; one row is a plain step", cost_table(facts.costs)
    )
    if any(arm.depth for arm in batch.arms):
        title = "What a round must give to pay, and gives at most (from the costs alone)"
        print_table(out, title, ceiling_table(facts.costs, batch.arms))


def print_result(out: Console, batch: Batch, result: Result) -> None:
    """Medians by arm and workload, latency by request, the trade, the verdict."""
    for mode in batch.pairs:
        rows = [row for row in result.rows if row.arm.mode == mode]
        title = f"{mode.capitalize()}: median tok/s; speed-up from the mean ratio of times"
        print_table(out, title, row_table(rows))
    if result.arm and result.trade:
        print_requests(out, result.served, result.arm, batch.limits)
        print_trade(out, result.trade, result.arm)
    for mode, verdict in result.verdicts.items():
        out.print(verdict_line(mode, verdict), soft_wrap=True)
        print_depth_note(out, result.rows, mode, verdict)
    if not result.verdicts and AUTO not in batch.arms:
        out.print(f"\nVerdict   none: {why_no_verdict(batch)}", soft_wrap=True)


def print_automatic(out: Console, found: Comparison) -> None:
    """What Automatic mode decided here, and how it did against what could have been chosen."""
    out.print(f"\nAutomatic  {found.status.text}   ({found.status.why})", soft_wrap=True)
    estimate = found.estimate
    if estimate:
        after = f"timed after {found.settle_requests} requests to settle"
        line = f"{percent(estimate.speedup)}, 90% interval {interval(estimate)}"
        out.print(f"  {after}: {line}", soft_wrap=True)
    if found.hindsight is not None:
        depths = ", ".join(f"{name} {depth}" for name, depth in found.best_depths.items())
        share = number(found.hindsight, 2)
        out.print(f"  {share} of the best fixed depths in hindsight ({depths})", soft_wrap=True)
    if found.held_out is not None:
        share = number(found.held_out, 2)
        out.print(f"  {share} of those that a workload's other replies would choose")
    if found.slowest:
        name, ratio = found.slowest
        out.print(f"  least gain on {name}: {number(ratio, 2)} times plain decoding's speed")
    if found.overhead is not None:
        out.print(
            f"  deciding took {100 * found.overhead:.2f}% of decode time, "
            f"and another {100 * (found.overhead_after or 0):.2f}% between replies"
        )


def why_no_verdict(batch: Batch) -> str:
    if batch.main_mode is None:
        return batch.loaded.draft_problem or "no draft, so nothing to compare"
    return "every reply was a single token, which has no decoding speed"


def machine_lines(machine: Machine) -> list[tuple[str, str]]:
    memory = f"{machine.memory_bytes / 2**30:,.0f} GiB memory"
    blas = f", {machine.blas}" if machine.blas else ""
    return [
        ("machine", f"{machine.chip}, {machine.cores} cores, {memory}, {machine.platform}"),
        ("device", f"{machine.device}{blas}; load {machine.load_average:.2f} at the start"),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
    ]


def pair_lines(pairs: Mapping[str, LoadedPair]) -> list[tuple[str, str]]:
    target = pairs["off"]
    quantization = f", {target.quantization}" if target.quantization else ""
    kind = f"{target.model_type}, {target.dtype}{quantization}"
    kv = f"{size(target.kv_bytes_per_token)} of K/V a token"
    drafts = [
        (mode, f"{pair.draft_name}, {size(pair.draft_bytes)}" if pair.draft_bytes else "no weights")
        for mode, pair in pairs.items()
        if mode not in ("off", "auto")
    ]
    return [("model", f"{target.name} ({kind}): {size(target.target_bytes)}, {kv}"), *drafts]


def read_line(costs: Costs) -> tuple[str, str]:
    gb_per_s = costs.read_bytes / costs.read_ms / 1e6
    return "ceiling", (
        f"reading all {size(costs.read_bytes)} of the target once takes {costs.read_ms:.2f} ms "
        f"({gb_per_s:,.1f} GB/s): no plain step is faster, so at most "
        f"{1000 / costs.read_ms:,.0f} tok/s"
    )


def card(lines: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for line in lines:
        table.add_row(*line)
    return table


def cost_table(costs: Costs) -> Table:
    table = new_table()
    table.add_column("rows")
    for n_rows in costs.verify_ms:
        table.add_column(str(n_rows), justify="right")
    table.add_row("ms", *(number(ms, 2) for ms in costs.verify_ms.values()))
    return table


def ceiling_table(costs: Costs, arms: Sequence[Arm]) -> Table:
    table = new_table()
    for name in ("mode", "depth", "draft step ms", "pays above tokens/round", "if all are kept"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for arm in arms[1:]:
        if arm == AUTO:
            continue
        table.add_row(
            arm.mode,
            str(arm.depth),
            number(costs.draft_ms.get(arm.mode), 2),
            number(costs.break_even(arm.mode, arm.depth), 2),
            percent(costs.ceiling(arm.mode, arm.depth)),
        )
    return table


def row_table(rows: Sequence[Row]) -> Table:
    """One mode: median speed with slowest and fastest, speed-up with its 90 % interval."""
    table = new_table()
    table.add_column("depth", justify="right", no_wrap=True)
    table.add_column("workload", overflow="fold")
    for name in ("tok/s", "from–to", "speed-up", "90% interval", "accept", "tok/rnd"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        compared = row.estimate if row.arm != OFF else None
        table.add_row(
            DASH if row.arm == AUTO else str(row.arm.depth),
            row.workload,
            number(row.tokens_per_s),
            f"{number(row.slowest_per_s, 0)}–{number(row.fastest_per_s, 0)}",
            percent(compared.speedup if compared else None),
            interval(compared),
            number(row.acceptance, 2),
            number(row.tokens_per_round, 2),
            end_section=row.workload == ALL,
        )
    return table


def print_requests(out: Console, served: Sequence[Served], arm: Arm, limits: Limits) -> None:
    """Latency of each request, prefill included, off and in the verdict's arm."""
    table = new_table()
    for name in ("#", "workload", "prompt", "reply", "off ms", "on ms", "change", "same text"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for one in served[:MAX_REQUEST_ROWS]:
        table.add_row(
            str(one.request.seed),
            one.request.prompt.workload,
            str(len(one.request.ids)),
            str(len(one.off.ids)),
            number(one.off.timing.latency_ms),
            number(one.replies[arm].timing.latency_ms),
            percent(one.latency_change(arm)),
            {True: "yes", False: "NO", None: DASH}[same_text(one, limits)],
        )
    print_table(out, f"Latency per request, prefill included: off and {arm_name(arm)}", table)
    if len(served) > MAX_REQUEST_ROWS:
        out.print(f"… and {len(served) - MAX_REQUEST_ROWS} more requests, all in the JSON below")
    out.print(same_text_line(served, limits))


def same_text_line(served: Sequence[Served], limits: Limits) -> str:
    if not limits.keeps_text:
        return (
            "Texts are not compared: the standard rule draws its own noise at temperature "
            f"{limits.temperature:g}, so they may differ while their law is the same."
        )
    n_same = sum(one.same_text for one in served)
    line = f"Same text in every arm: {n_same} of {len(served)} requests."
    if n_same < len(served):
        line += " On Metal a near-tie may fall the other way; on the CPU this is a fault."
    return line


def print_trade(out: Console, trade: Trade, arm: Arm) -> None:
    saved = trade.passes_off - trade.passes_on
    share = saved / trade.passes_off if trade.passes_off else 0.0
    verb = "saves" if saved >= 0 else "adds"
    lines = (
        f"\nWhat {arm_name(arm)} trades, over the batch:",
        f"  {verb} {abs(saved):,} of {trade.passes_off:,} passes over the target's weights "
        f"({percent(-share)})",
        f"  throws away {trade.thrown_away:,} of {trade.drafted:,} drafted ids",
        f"  holds {size(trade.extra_kv_bytes)} more K/V in a round",
        f"  holds {size(trade.draft_bytes)} of draft weights",
    )
    out.print("\n".join(lines), soft_wrap=True)


def verdict_line(mode: str, verdict: Verdict) -> str:
    estimate = verdict.estimate
    spread = f"90% interval {interval(estimate)}"
    if estimate.low is None:
        spread = "one prompt has no interval, so Off"
    elif not verdict.is_on and estimate.speedup > 0:
        spread += ", so not shown to be faster"
    return (
        f"\nVerdict   {verdict.text}   ({mode}, depth {verdict.depth}: "
        f"{percent(estimate.speedup)}, {spread}, {verdict.requests} prompts)"
    )


def print_depth_note(out: Console, rows: Sequence[Row], mode: str, verdict: Verdict) -> None:
    """Where requests favour different depths, the verdict is not any one depth's figure."""
    arm = Arm(mode, verdict.depth)
    estimate = next(row.estimate for row in rows if row.arm == arm and row.workload == ALL)
    if estimate and abs(estimate.speedup - verdict.estimate.speedup) > SAME_SPEEDUP:
        out.print(
            "  Requests favour different depths, so each counts with the depth that the others "
            f"favour; depth {verdict.depth} for all is {percent(estimate.speedup)}.",
            soft_wrap=True,
        )


def print_table(out: Console, title: str, table: Table) -> None:
    out.print()
    out.print(title)
    out.print(table)


def new_table() -> Table:
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


# --- for a program ----------------------------------------------------------------------------


def as_json(
    batch: Batch, facts: Facts, result: Result, automatic: Comparison | None = None
) -> dict[str, Any]:
    """The bench as plain values. Shares and speed-ups are fractions; times end in _s or _ms."""
    target, arm, verdict = batch.pairs["off"], result.arm, result.verdict
    return {
        "work": {
            "brief": BRIEF,
            "class": BRIEF_CLASS,
            "sha256": hashlib.sha256(BRIEF.encode()).hexdigest(),
        },
        "machine": {**vars(facts.machine), "versions": dict(facts.machine.versions)},
        "model": target.name,
        "draft": batch.pairs[batch.main_mode].draft_name if batch.main_mode else None,
        "facts": {
            "model_type": target.model_type,
            "dtype": target.dtype,
            "quantization": target.quantization,
            "target_bytes": target.target_bytes,
            "draft_bytes": {mode: pair.draft_bytes for mode, pair in batch.pairs.items()},
            "kv_bytes_per_token": target.kv_bytes_per_token,
            "verify_pass_ms": {str(n): ms for n, ms in facts.costs.verify_ms.items()},
            "draft_step_ms": dict(facts.costs.draft_ms),
            "read_weights_ms": facts.costs.read_ms,
        },
        "settings": vars(batch.limits),
        "modes": [row_json(row) for row in result.rows],
        "requests": [request_json(one, arm, batch.limits) for one in result.served],
        "trade": vars(result.trade) if result.trade else None,
        "verdicts": [verdict_json(mode, each) for mode, each in result.verdicts.items()],
        "verdict": verdict_json(arm.mode, verdict) if arm and verdict else None,
        "automatic": automatic_json(automatic) if automatic else None,
    }


def live_json(batch: Batch, replies: Sequence[LiveReply]) -> dict[str, Any]:
    """Requests served once under Automatic: what each did, and the status it left behind."""
    return {
        "model": batch.loaded.name,
        "draft": batch.loaded.draft_name,
        "requests": [
            {
                "workload": one.request.prompt.workload,
                "temperature": batch.limits.of(one.request).temperature,
                "mode": one.paced.mode if one.paced else None,
                "output_tokens": len(one.reply.ids),
                "tokens_per_second": one.reply.timing.tokens_per_s,
                "drafted": one.reply.timing.drafted,
                "accepted": one.reply.timing.accepted,
                "stops": one.paced.n_stops if one.paced else 0,
                "status": one.status.text,
            }
            for one in replies
        ],
        "status": {**asdict(replies[-1].status), "text": replies[-1].status.text},
    }


def automatic_json(found: Comparison) -> dict[str, Any]:
    estimate = found.estimate
    return {
        "status": {**asdict(found.status), "text": found.status.text},
        "settle_requests": found.settle_requests,
        "speedup": estimate.speedup if estimate else None,
        "low": estimate.low if estimate else None,
        "high": estimate.high if estimate else None,
        "of_best_in_hindsight": found.hindsight,
        "of_best_held_out": found.held_out,
        "best_depths": dict(found.best_depths),
        "over_plain": dict(found.by_workload),
        "controller_share": found.overhead,
        "controller_share_after": found.overhead_after,
    }


def row_json(row: Row) -> dict[str, Any]:
    estimate = row.estimate
    return {
        "mode": row.arm.mode,
        "depth": row.arm.depth,
        "workload": row.workload,
        "requests": row.requests,
        "tokens_per_second": row.tokens_per_s,
        "slowest": row.slowest_per_s,
        "fastest": row.fastest_per_s,
        "speedup": estimate.speedup if estimate else None,
        "low": estimate.low if estimate else None,
        "high": estimate.high if estimate else None,
        "acceptance": row.acceptance,
        "tokens_per_round": row.tokens_per_round,
    }


def request_json(one: Served, arm: Arm | None, limits: Limits) -> dict[str, Any]:
    """One request; `on` is the verdict's arm, null when there is no verdict."""
    return {
        "workload": one.request.prompt.workload,
        "seed": one.request.seed,
        "prompt_tokens": len(one.request.ids),
        "output_tokens": len(one.off.ids),
        "off": reply_json(one, OFF),
        "on": reply_json(one, arm) if arm else None,
        "latency_change": one.latency_change(arm) if arm else None,
        "same_text": same_text(one, limits),
    }


def reply_json(one: Served, arm: Arm) -> dict[str, Any]:
    timing = one.replies[arm].timing
    return {"latency_s": timing.latency_ms / 1000, "tokens_per_second": timing.tokens_per_s}


def same_text(one: Served, limits: Limits) -> bool | None:
    return one.same_text if limits.of(one.request).keeps_text else None


def verdict_json(mode: str, verdict: Verdict) -> dict[str, Any]:
    return {
        "text": verdict.text,
        "speedup": verdict.estimate.speedup,
        "low": verdict.estimate.low,
        "high": verdict.estimate.high,
        "depth": verdict.depth,
        "mode": mode,
    }
