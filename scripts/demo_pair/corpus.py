"""The demo corpus: seeded samples, split into train, dev and held-out, packed into rows.

Nothing is downloaded: every word comes from skills.py. A sample belongs to a split by the hash of
its prompt, so a held-out prompt never occurs in training, whatever the seed.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from demo_pair.sample import Sample
from demo_pair.skills import ASKED, SKILLS, noise_copy

ROW_TOKENS = {"short": 256, "usual": 512, "long": 1024}
SHORT_TOKENS = 120  # documents up to this make the short rows
# shares of the documents; counting takes the longest to learn
MIX = {
    "count": 44,
    "json": 10,
    "copy": 9,
    "code": 6,
    "tool": 10,
    "chat": 6,
    "story": 4,
    "edit": 20,
    "think": 12,
}
NOISE_SHARE = 0.04  # of all documents: random words to repeat
FOLLOW_UP_SHARE = 0.25  # of the documents hold two to four exchanges
SPLITS = {0: "heldout", 1: "dev"}  # hash buckets, of 16; the other 14 are training


def split_of(sample: Sample) -> str:
    """Which split a sample belongs to, from its system text and last prompt alone."""
    if sample.fixed:
        return "train"
    system = [m["content"] for m in sample.messages if m["role"] == "system"]
    prompt = [m["content"] for m in sample.messages if m["role"] == "user"][-1]
    digest = hashlib.sha256("\n".join([*system, prompt]).encode()).digest()
    return SPLITS.get(digest[0] % 16, "train")


def samples(rng: random.Random, split: str, mix: dict[str, int] = MIX) -> Iterator[Sample]:
    """An endless stream of samples of one split."""
    names, weights = zip(*mix.items(), strict=True)
    while True:
        is_noise = split == "train" and rng.random() < NOISE_SHARE
        make = noise_copy if is_noise else SKILLS[rng.choices(names, weights)[0]]
        sample = make(rng)
        if split_of(sample) == split:
            yield sample


def questions(split: str, skill: str, n: int, seed: int = 7) -> list[Sample]:
    """`n` different samples of a skill from a split that training never sees."""
    rng, found = random.Random(f"{seed} {split} {skill}"), {}
    for _ in range(200 * n):
        sample = ASKED[skill](rng)
        if split_of(sample) == split and sample.skill == skill:
            found.setdefault(json.dumps(sample.messages), sample)
        if len(found) == n:
            break
    return list(found.values())


def conversation(rng: random.Random, stream: Iterator[Sample]) -> Sample:
    """One sample, or two to four exchanges in a row; the last of them is the reply."""
    last = next(stream)
    if rng.random() >= FOLLOW_UP_SHARE or last.thinking or last.messages[0]["role"] == "system":
        return last
    earlier: list[dict] = []
    for _ in range(rng.randint(1, 3)):
        past = next(stream)
        if past.skill not in ("tool", "tool_answer", "think") and len(past.messages) == 1:
            earlier += [*past.messages, {"role": "assistant", "content": past.reply}]
    if earlier and rng.random() < 0.1:
        again = [{"role": "user", "content": rng.choice(("Say that again.", "Repeat that."))}]
        return Sample("copy", earlier + again, earlier[-1]["content"])
    return replace(last, messages=earlier + last.messages)


# --- tokens -----------------------------------------------------------------------------------


def prompt_text(tokenizer, sample: Sample) -> str:
    """The rendered chat up to where the model takes over."""
    return tokenizer.apply_chat_template(
        sample.messages,
        tools=sample.tools or None,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=sample.thinking,
    )


def encode(tokenizer, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """ids (T,) uint16 and learned (T,) uint8: 1 where the id is the model's to predict."""
    closing = "" if sample.reply.endswith("<|tool_response>") else "<turn|>"
    text = prompt_text(tokenizer, sample) + sample.reply + closing
    ids = tokenizer.encode(text, add_special_tokens=False)
    return np.array(ids, np.uint16), learned_mask(tokenizer, ids)


def learned_mask(tokenizer, ids: list[int]) -> np.ndarray:
    """Marks the model's turns, their closing token included, without tools' results."""
    special = {t: tokenizer.convert_tokens_to_ids(t) for t in SPECIALS}
    opening = tokenizer.encode("<|turn>model\n", add_special_tokens=False)
    mask, is_model, is_result = np.zeros(len(ids), np.uint8), False, False
    for i, token in enumerate(ids):
        mask[i] = is_model and not is_result
        if ids[max(0, i + 1 - len(opening)) : i + 1] == opening:
            is_model = True
        elif token == special["<turn|>"]:
            is_model = False
        elif token == special["<|tool_response>"]:
            is_result = True
        elif token == special["<tool_response|>"]:
            is_result = False
    return mask


SPECIALS = ("<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>")


def pack(documents: list[tuple[np.ndarray, np.ndarray]], row_tokens: int):
    """Fill rows with whole documents, the longest that fits first.

    Returns ids (N, row_tokens) uint16, padded with 0, and the mask of the same shape.
    """
    waiting = sorted((d for d in documents if len(d[0]) <= row_tokens), key=lambda d: len(d[0]))
    rows, masks = [], []
    while waiting:
        row, mask = np.zeros(row_tokens, np.uint16), np.zeros(row_tokens, np.uint8)
        at = 0
        while (i := longest_fitting(waiting, row_tokens - at)) is not None:
            ids, learned = waiting.pop(i)
            row[at : at + len(ids)], mask[at : at + len(ids)] = ids, learned
            at += len(ids)
        rows.append(row)
        masks.append(mask)
    return np.stack(rows), np.stack(masks)


def longest_fitting(waiting: list, space: int) -> int | None:
    """waiting  sorted by length"""
    low, high = 0, len(waiting)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if len(waiting[middle][0]) <= space else (low, middle)
    return low - 1 if low else None


def pack_pools(documents: list, row_tokens: int, pool: int = 400):
    """Pack in small pools, so that a row mixes the skills instead of sorting them by length."""
    parts = [pack(documents[i : i + pool], row_tokens) for i in range(0, len(documents), pool)]
    rows, masks = zip(*parts, strict=True)
    return np.concatenate(rows), np.concatenate(masks)


def build(tokenizer, n_documents: int, seed: int, file: Path, mix: dict[str, int] = MIX) -> int:
    """Write the packed training rows, ids and mask of each kind. Returns the tokens."""
    rng = random.Random(seed)
    stream = samples(rng, "train", mix)
    documents = [encode(tokenizer, conversation(rng, stream)) for _ in range(n_documents)]
    cut = n_documents // 10
    kinds = {
        "short": [d for d in documents if len(d[0]) <= SHORT_TOKENS],
        "usual": documents[cut:],
        "long": documents[:cut],
    }
    arrays = {}
    for kind, chosen in kinds.items():
        packed = pack_pools(chosen, ROW_TOKENS[kind])
        arrays[f"ids_{kind}"], arrays[f"mask_{kind}"] = packed
    np.savez(file, **arrays)
    return sum(len(d[0]) for d in documents)


def with_text(message: dict) -> dict:
    """The message as a client would send it: a tool's result as JSON text."""
    content = message["content"]
    return message | {"content": content if isinstance(content, str) else json.dumps(content)}


def write_heldout(file: Path, n: int = 50) -> None:
    """The held-out questions of every skill, as readable JSON."""
    table = {}
    for skill in ASKED:
        rows = questions("heldout", skill, n)
        table[skill] = [
            {
                "messages": [with_text(message) for message in s.messages],
                "tools": s.tools,
                "enable_thinking": s.thinking,
                "expected": s.reply,
                "exact": s.exact,
            }
            for s in rows
        ]
    lines = ",\n".join(
        f"{json.dumps(skill)}: [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        for skill, rows in table.items()
    )
    file.write_text("{\n" + lines + "\n}\n")
