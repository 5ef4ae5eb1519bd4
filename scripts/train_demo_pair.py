"""Train the embedded demo pair: corpus, tokenizer, target, assistant, evaluation and card.

    python scripts/train_demo_pair.py                   every stage, into build/demo
    python scripts/train_demo_pair.py --stage target    one stage; training resumes what is there
    python scripts/train_demo_pair.py --smoke           every stage at toy size, about a minute

On two cores, start one process a core (see target.Team):

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 scripts/train_demo_pair.py

Needs the extra `train`. Runs on the CPU and reads nothing from the network.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from demo_pair import assistant, card, corpus, evaluate, target, tokenizer
from transformers import AutoTokenizer, Gemma4AssistantForCausalLM, Gemma4ForCausalLM

TEMPLATE = Path(__file__).parent / "demo_pair" / "chat_template.jinja"
DEFAULT_MINUTES = {"target": 52.0, "assistant": 12.0}
SMOKE = {"minutes": 0.15, "n_documents": 200, "n_tokenizer": 300, "n_heldout": 2}


def tokenizer_stage(args) -> None:
    """Learn the merges on sampled text; the tokenizer belongs to the target's folder."""
    stream = corpus.samples(random.Random(args.seed), "train")
    texts = [text for _ in range(args.n_tokenizer) for text in plain_texts(next(stream))]
    folder = args.out / "target"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(tokenizer.train(texts), folder, TEMPLATE.read_text())


def plain_texts(sample) -> list[str]:
    contents = [m["content"] for m in sample.messages if isinstance(m["content"], str)]
    frame = ["system\n", "user\n", "model\n", "declaration:", "call:", "response:", "thought\n"]
    declared = [json.dumps(t["function"]) for t in sample.tools]
    return [*contents, sample.reply, *frame, *declared, "INTEGER", "STRING", "OBJECT"]


def corpus_stage(args) -> None:
    """Render and pack the training rows; write the held-out questions."""
    words = load_tokenizer(args)
    tokens = corpus.build(words, args.n_documents, args.seed + 1, args.out / "corpus.npz")
    corpus.write_heldout(args.out / "heldout.json", args.n_heldout)
    print(f"corpus: {tokens:,} tokens")


def target_stage(args) -> None:
    words = load_tokenizer(args)

    def report(model) -> None:
        target.save_pretrained(model, args.out / "target")
        if not args.smoke:
            print(evaluate.report(model, words), flush=True)

    result = target.train(
        rows(args), args.out, minutes(args, "target"), args.team, args.size, report
    )
    note(args, "target", result)


def assistant_stage(args) -> None:
    model, words = load_target(args), load_tokenizer(args)
    skills = ("chat", "code", "json", "count", "story") if args.team.rank == 0 else ()
    texts = {skill: evaluate.greedy_texts(model, words, skill, 3, "dev") for skill in skills}

    def report(draft) -> None:
        print(evaluate.acceptance_line(model, draft, texts), flush=True)

    spent = minutes(args, "assistant")
    result = assistant.train(model, rows(args), args.out, spent, args.team, args.size, report)
    note(args, "assistant", result)


def centroids_stage(args) -> None:
    """Give the trained draft its centroid head; the tied one stays in assistant.pt."""
    model = load_target(args)
    draft = assistant.restore(model, args.out / "assistant.pt", args.size, rounded=True)
    ordered = assistant.with_centroids(draft)
    assistant.fit_centroids(ordered, assistant.draft_states(model, draft, rows(args)))
    target.save_pretrained(ordered, args.out / "assistant")


def evaluate_stage(args) -> None:
    model, words = load_target(args), load_tokenizer(args)
    tied = assistant.restore(model, args.out / "assistant.pt", args.size, rounded=True)
    ordered = Gemma4AssistantForCausalLM.from_pretrained(args.out / "assistant", dtype="float32")
    measured = evaluate.everything(model, tied, ordered, words, args.n_heldout)
    (args.out / "evaluation.json").write_text(json.dumps(measured, indent=1) + "\n")


def card_stage(args) -> None:
    measured = json.loads((args.out / "evaluation.json").read_text())
    (args.out / "README.md").write_text(card.text(args.out, measured, training(args)))


STAGES = {
    "tokenizer": tokenizer_stage,
    "corpus": corpus_stage,
    "target": target_stage,
    "assistant": assistant_stage,
    "centroids": centroids_stage,
    "evaluate": evaluate_stage,
    "card": card_stage,
}
TEAM_STAGES = ("target", "assistant")  # the others are the first process's alone


def rows(args) -> target.Rows:
    return target.Rows(args.out / "corpus.npz", args.batch_tokens, args.seed + args.team.rank)


def minutes(args, stage: str) -> float:
    return args.minutes or DEFAULT_MINUTES[stage]


def load_tokenizer(args):
    return AutoTokenizer.from_pretrained(args.out / "target")


def load_target(args) -> Gemma4ForCausalLM:
    """The saved target, its bfloat16 weights run in float32."""
    return Gemma4ForCausalLM.from_pretrained(args.out / "target", dtype="float32").eval()


def training(args) -> dict:
    file = args.out / "training.json"
    return json.loads(file.read_text()) if file.exists() else {}


def note(args, stage: str, result: dict) -> None:
    """Keep what a stage took, for the card."""
    if args.team.rank > 0:
        return
    table = training(args) | {stage: result}
    (args.out / "training.json").write_text(json.dumps(table, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--stage", choices=STAGES, help="only this one; default: all in order")
    parser.add_argument("--minutes", type=float, help="budget of a training stage")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to test the stages")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--n-documents", type=int, default=60_000)
    parser.add_argument("--n-tokenizer", type=int, default=12_000)
    parser.add_argument("--n-heldout", type=int, default=50)
    args = parser.parse_args()
    args.size = "smoke" if args.smoke else "demo"
    if args.smoke:
        vars(args).update(SMOKE)
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    args.team = target.Team()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in [args.stage] if args.stage else STAGES:
        if args.team.rank == 0 or name in TEAM_STAGES:
            print(f"== {name}", flush=True)
            STAGES[name](args)
        args.team.wait()


if __name__ == "__main__":
    main()
