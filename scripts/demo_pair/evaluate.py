"""Measures the demo pair: exact match by skill, and acceptance of the drafts by workload and depth.

Weights are read back from their bfloat16 files and run in float32, as the product runs them on CPU.
"""

import time
from collections.abc import Sequence

import torch
from transformers import DynamicCache

from demo_pair import assistant, corpus
from demo_pair.sample import Sample
from demo_pair.skills import ASKED

STOP_IDS = (1, 50, 106)
DEPTHS = 6
WORKLOADS = ("chat", "code", "json", "edit", "count", "story", "copy", "tool", "think")


@torch.no_grad()
def greedy(model, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy replies to B prompts of any lengths, decoded together.

    Returns B lists of ids, the stop id included where one was reached.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    replies = [[] for _ in prompts]
    for _ in range(max_tokens):
        ids = next_ids(model, ids, seen, positions, cache)
        for reply, token in zip(replies, ids[:, 0].tolist(), strict=True):
            if not reply or reply[-1] not in STOP_IDS:
                reply.append(token)
        if all(reply[-1] in STOP_IDS for reply in replies):
            break
        seen = torch.cat([seen, seen.new_ones(len(prompts), 1)], 1)
        positions = positions[:, -1:] + 1
    return replies


def next_ids(model, ids, seen, positions, cache) -> torch.Tensor:
    """The likeliest next ids (B, 1); ids and positions are (B, T), seen covers the cache."""
    out = model(
        input_ids=ids,
        attention_mask=seen,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return out.logits[:, -1:].argmax(-1)


def prompt_ids(tokenizer, sample: Sample) -> list[int]:
    return tokenizer.encode(corpus.prompt_text(tokenizer, sample), add_special_tokens=False)


def answers(model, tokenizer, samples: Sequence[Sample], slack: int = 8) -> list[str]:
    """Greedy replies as raw text, the closing token left out."""
    prompts = [prompt_ids(tokenizer, s) for s in samples]
    wanted = (len(tokenizer.encode(s.reply, add_special_tokens=False)) for s in samples)
    replies = greedy(model, prompts, max(wanted) + slack)
    kept = [ids[:-1] if ids[-1] in (1, 106) else ids for ids in replies]
    return [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in kept]


def exact_match(model, tokenizer, split: str, n: int) -> dict[str, float]:
    """Share of replies that are right to the letter, for each skill with one right reply."""
    asked = [s for k in ASKED for s in corpus.questions(split, k, n) if s.exact]
    asked.sort(key=lambda s: len(s.reply))
    hits: dict[str, list[bool]] = {s.skill: [] for s in asked}
    for i in range(0, len(asked), 50):
        part = asked[i : i + 50]
        for sample, text in zip(part, answers(model, tokenizer, part), strict=True):
            hits[sample.skill].append(text == sample.reply)
    return {skill: sum(found) / len(found) for skill, found in hits.items()}


def report(model, tokenizer, split: str = "dev", n: int = 6) -> str:
    begun = time.perf_counter()
    shares = exact_match(model.eval(), tokenizer, split, n)
    model.train()
    line = "  ".join(f"{skill} {share:.2f}" for skill, share in shares.items())
    return f"exact match  {line}  ({time.perf_counter() - begun:.0f} s)"


# --- acceptance -------------------------------------------------------------------------------


@torch.no_grad()
def agreement(target, draft, ids: list[int], n_prompt: int, depths: int = DEPTHS) -> torch.Tensor:
    """Where the draft's k-th guess is right, if all its earlier ones are, for every start.

    ids  prompt and greedy reply; the reply begins at n_prompt

    Returns right (n, depths) bool: row i drafts once reply id i is known, at the last cached
    position.
    """
    row = torch.tensor([ids])
    masks = assistant.full_masks(len(ids))
    hidden, _, shared = assistant.target_states(target, row, masks)
    columns = []
    for k in range(1, depths + 1):
        token = target.model.embed_tokens(shifted(row, k))
        state, hidden = assistant.step(draft, token, hidden, masks, shared)
        guess = assistant.head(draft, state).argmax(-1)
        columns.append(guess == shifted(row, k + 1))
    return torch.stack(columns, -1)[0, n_prompt - 1 : len(ids) - 2]


def shifted(row: torch.Tensor, k: int) -> torch.Tensor:
    """row (1, T) moved left by k; the end is filled with an id that nobody predicts."""
    return torch.cat([row[:, k:], row.new_full((1, min(k, row.shape[1])), 3)], 1)


def rounds(right: torch.Tensor, depth: int) -> list[int]:
    """Accepted drafts of each round of a whole reply, drafting `depth` ids a round."""
    taken, at = [], 0
    while at < len(right):
        kept = right[at, :depth].long().cumprod(0).sum().item()
        taken.append(min(kept, len(right) - at))
        at += kept + 1
    return taken


def greedy_texts(target, tokenizer, skill: str, n: int, split: str) -> list[tuple[list[int], int]]:
    """Prompts with the target's own greedy replies: (ids, length of the prompt)."""
    prompts = [prompt_ids(tokenizer, s) for s in corpus.questions(split, skill, n)]
    replies = greedy(target, prompts, 320)
    return [(p + r, len(p)) for p, r in zip(prompts, replies, strict=True) if len(r) > 4]


def acceptance(target, draft, texts: list[tuple[list[int], int]]) -> dict:
    """Rates of one workload.

    Returns {"by_depth": share of the k-th drafts accepted once the ones before were,
    "tokens_per_round": {depth: mean ids a target pass yields}}.
    """
    tables = [agreement(target, draft, ids, n_prompt) for ids, n_prompt in texts]
    taken = [n for right in tables for n in rounds(right, DEPTHS)]
    by_depth = []
    for k in range(1, DEPTHS + 1):
        tried = sum(n >= k - 1 for n in taken)
        by_depth.append(sum(n >= k for n in taken) / max(1, tried))
    per_round = {}
    for depth in (1, 2, 4, 6):
        counts = [n + 1 for right in tables for n in rounds(right, depth)]
        per_round[str(depth)] = sum(counts) / max(1, len(counts))
    return {"by_depth": by_depth, "tokens_per_round": per_round}


def acceptance_line(target, draft, texts: dict) -> str:
    """One line for the log; texts are greedy_texts by skill."""
    draft.eval()
    parts = []
    for skill, chosen in texts.items():
        rates = acceptance(target, draft, chosen)
        parts.append(f"{skill} {rates['by_depth'][0]:.2f} {rates['tokens_per_round']['4']:.2f}")
    draft.train()
    return "first draft accepted, ids a round at depth 4:  " + "  ".join(parts)


def everything(target, tied, ordered, tokenizer, n: int) -> dict:
    """All that the card tells: exact match on held-out prompts, acceptance with both heads."""
    exact = exact_match(target, tokenizer, "heldout", n)
    measured = {"n_questions": n, "exact": exact, "acceptance": {}}
    for skill in WORKLOADS:
        texts = greedy_texts(target, tokenizer, skill, max(2, n // 3), "heldout")
        measured["acceptance"][skill] = {
            name: acceptance(target, draft.eval(), texts)
            for name, draft in (("tied", tied), ("centroid", ordered))
        }
    return measured
