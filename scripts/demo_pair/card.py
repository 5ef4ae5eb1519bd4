"""The demo pair's card: what it is, how it was made, what was measured, what it cannot do."""

import json
from pathlib import Path

ABOUT = """\
# The demo pair

A very small Gemma 4 text model (`target/`) and its matching draft (`assistant/`), so that the whole
worker can be tried, tested and benchmarked without a download. Both were trained from random
weights by `scripts/train_demo_pair.py` on text that the script itself writes; no other text,
weights or tokenizer went in. Same licence as the program.

It is a demonstration of the machinery, not a useful assistant: it knows a few hundred words and the
skills below, and nothing else.
"""

LIMITS = """\
## Limits

- It only understands prompts worded like those in `heldout.json`. Others get fluent nonsense.
- Exact replies are measured on new combinations of known patterns, not on new patterns.
- Editing mostly copies. Adding, removing and numbering sentences work; asked to replace a word, it
  often gives the text back unchanged.
- With thinking on it adds small numbers well; asked the same without thinking it mostly guesses.
- Greedy stories repeat themselves; sampled ones vary.
- It was trained on contexts up to 1,024 tokens, mostly on 512 and fewer. Longer ones run, but how
  well is not measured.
- Its facts (capitals, animals) are a short fixed list. Arithmetic beyond adding small numbers is
  not taught; with a calculator tool it copies the numbers into the call and the result out of it.
- Acceptance here says nothing about acceptance on a real model: this text is far more predictable.
- English only. Other scripts pass through the byte-level tokenizer but mean nothing to the model.
"""

MAKING = """\
## Training

On a CPU: two processes of one thread each, on two cores that other work shared. The shares of the
skills were tuned while these weights were in training (counting and editing were raised); the
script holds the last ones, so a new run gives a similar pair, not the same bytes.

"""

SKILL_NOTES = {
    "count": "count up, down, in steps",
    "json": "objects, lists and nested records from a sentence",
    "copy": "repeat a text",
    "code": "small Python functions and classes, names from the prompt",
    "tool": "call the right declared tool",
    "tool_answer": "tell a tool's result",
    "chat": "small talk, introductions, a system rule",
    "edit": "replace, add, remove, number sentences",
    "think": "think aloud, then answer",
}


def text(folder: Path, measured: dict, training: dict) -> str:
    parts = [
        ABOUT,
        sizes(folder),
        shapes(folder),
        skills(measured["exact"], measured["n_questions"]),
        acceptance(measured),
        making(training),
        LIMITS,
    ]
    return "\n".join(parts)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def sizes(folder: Path) -> str:
    rows = []
    for name in ("target", "assistant"):
        files = list((folder / name).iterdir())
        weights = (folder / name / "model.safetensors").stat().st_size
        total = sum(file.stat().st_size for file in files)
        rows.append([name, f"{weights / 2e6:.2f} M", f"{total / 1e6:.2f} MB"])
    return "## Sizes\n\n" + table(["folder", "weights (bfloat16)", "on disk"], rows)


def shapes(folder: Path) -> str:
    """The two configurations side by side."""
    target = json.loads((folder / "target" / "config.json").read_text())
    draft = json.loads((folder / "assistant" / "config.json").read_text())
    text_config = draft["text_config"]
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_kv_shared_layers")
    keys += ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
    keys += ("hidden_size_per_layer_input", "use_double_wide_mlp", "final_logit_softcapping")
    keys += ("vocab_size",)
    rows = [[f"`{key}`", str(target[key]), str(text_config[key])] for key in keys]
    rows.append(["layers", pattern(target), pattern(text_config)])
    rows.append(["head size, full layers", *(full_head_dim(c) for c in (target, text_config))])
    rows.append(["head", "tied embedding", centroid_head(draft)])
    return "## Configuration\n\n" + table(["", "target", "assistant"], rows)


def pattern(config: dict) -> str:
    return " ".join(kind[0] for kind in config["layer_types"])


def full_head_dim(config: dict) -> str:
    return str(next(iter(config["per_layer_config"].values()))["head_dim"])


def centroid_head(draft: dict) -> str:
    if not draft["use_ordered_embeddings"]:
        return "tied embedding"
    return f"{draft['num_centroids']} centroids, top {draft['centroid_intermediate_top_k']}"


def skills(exact: dict, n: int) -> str:
    rows = [[k, SKILL_NOTES[k], f"{100 * share:.0f} %"] for k, share in exact.items()]
    lead = (
        "## Skills\n\nGreedy replies that are right to the last letter, on up to "
        f"{n} held-out prompts a skill\n(`heldout.json`: a hash keeps them out of training). "
        "bfloat16 weights run in float32.\nStories have no single right reply and are not counted."
        "\n\n"
    )
    return lead + table(["skill", "what", "exact"], rows)


def acceptance(measured: dict) -> str:
    """By workload: the share of k-th drafts accepted, and ids per target pass."""
    rows = []
    for skill, heads in measured["acceptance"].items():
        for name, rates in heads.items():
            depths = [f"{100 * share:.0f}" for share in rates["by_depth"]]
            per_round = [f"{rates['tokens_per_round'][d]:.2f}" for d in ("2", "4", "6")]
            rows.append([skill, name, *depths, *per_round])
    head = ["workload", "head", *(f"d{k} %" for k in range(1, 7)), "ids/pass at 2", "at 4", "at 6"]
    lead = (
        "## Acceptance\n\nGreedy, query at the last cached position, on the target's replies to "
        "held-out prompts.\nd*k*: how often the k-th draft is accepted when those before it were. "
        "`tied` is the draft before\nit got its centroid head; the files hold the centroid head."
        "\n\n"
    )
    loss = (
        "\nOn average over the workloads the centroid head changes first-draft acceptance by "
        f"{lost(measured)} points.\n"
    )
    return lead + table(head, rows) + loss


def lost(measured: dict) -> str:
    workloads = measured["acceptance"].values()
    changes = [w["centroid"]["by_depth"][0] - w["tied"]["by_depth"][0] for w in workloads]
    return f"{100 * sum(changes) / len(changes):+.2f}"


def making(training: dict) -> str:
    rows = [
        [stage, f"{row['minutes']:.0f} min", f"{row['tokens'] / 1e6:.2f} M", f"{row['loss']:.3f}"]
        for stage, row in training.items()
    ]
    return MAKING + table(["stage", "time", "tokens", "last loss"], rows)
