"""What a controller knows → the status record that everything shows.

Owns which figures travel with a verdict, and the sentence of why. Leaves the nine texts and their
precedence to records.py, which the gateway shares. Pure; any thread.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mlx_worker.control.decide import Evidence
from mlx_worker.records import MAX_DEPTH, Status, whole_percent

if TYPE_CHECKING:
    from mlx_worker.control.controller import Controller

DEPTHS = range(1, MAX_DEPTH + 1)
WHY_AUTOMATIC = "no request since the model was loaded"
WHY_MEASURING = "comparing drafts with plain decoding on the first requests"
WHY_WAITING = "comparing slowly: trials have used up what they may cost for now"
WHY_SAVINGS = "what drafts saved has fallen: measuring again"
WHY_DOUBT = "recent requests no longer show a gain: measuring again"
WHY_RETRY = "a re-try was faster: measuring again"


def why_on(policy: Evidence) -> str:
    return f"{policy.n} requests were {_percent(policy.theta)} % faster with drafts"


def why_off(fixed: Evidence) -> str:
    percent = _percent(fixed.theta)
    if percent < 0:
        return f"{fixed.n} requests would have been {-percent} % slower with drafts"
    return f"{fixed.n} requests were not clearly faster with drafts"


def _percent(theta: float) -> int:
    return whole_percent(math.expm1(theta))


def status_of(controller: Controller) -> Status:
    memory = controller.memory
    ledger = memory.ledger
    loss = ledger.trial_loss
    share = loss / ledger.decode if ledger.decode else 0.0
    if not memory.n_requests:
        return Status("automatic", why=WHY_AUTOMATIC)
    if not memory.samples or not memory.costs.pairs:
        return Status(
            memory.phase, loss=loss, loss_share=share, since_s=memory.since_s,
            why=memory.why or WHY_MEASURING,
        )  # fmt: skip
    is_off = memory.phase == "off"
    shown = controller.fixed[0] if is_off else controller.policy
    estimate = shown.estimate
    priced = controller.priced
    n_rounds = [sum(counts) for counts in zip(*priced.n_rounds, strict=True)]
    total = sum(n_rounds)
    why = memory.why or WHY_MEASURING
    if memory.phase == "measuring" and ledger.is_spent:
        why = WHY_WAITING
    return Status(
        state=memory.phase,
        speedup=estimate.speedup,
        low=estimate.low,
        high=estimate.high,
        depth=controller.fixed[1] if is_off else max(DEPTHS, key=lambda depth: n_rounds[depth]),
        acceptance=priced.accepted / priced.drafted if priced.drafted else None,
        tokens_per_round=priced.tokens / total,
        cost=priced.cost / total,
        spread=shown.measured_spread,
        requests=len(memory.samples),
        tokens=priced.tokens + priced.plain_tokens,
        loss=loss,
        loss_share=share,
        since_s=memory.since_s,
        why=why,
    )
