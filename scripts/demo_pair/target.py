"""The demo target: a small Gemma 4 text model with every part of the family, trained from scratch.

Runs on CPU threads only. Matrices learn by Muon, the rest by AdamW; the learning rate follows the
clock, so that a budget in minutes is kept exactly.
"""

import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, GenerationConfig

from demo_pair.corpus import ROW_TOKENS
from demo_pair.tokenizer import VOCAB_SIZE

WINDOW = 128
PEAK_RATE = 3e-3
REPORT_S = 240.0
EARLY_SHARES, LATE_SHARES = (0.9, 0.1, 0.0), (0.25, 0.6, 0.15)  # of short, usual and long rows
EARLY_UNTIL = 0.38  # of the budget
PROMPT_SAMPLE, PROMPT_WEIGHT = 0.125, 0.3  # prompts are mostly random words: little to learn there
SIZES = {
    "demo": {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 8},
    "smoke": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8},
}


def config(size: str = "demo") -> Gemma4TextConfig:
    return Gemma4TextConfig(
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=VOCAB_SIZE,
        **SIZES[size],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2,
        sliding_window=WINDOW,
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=16,
        use_double_wide_mlp=True,
        final_logit_softcapping=30.0,
        max_position_embeddings=4096,
        eos_token_id=[1, 106, 50],
    )


def create(size: str = "demo", seed: int = 0) -> Gemma4ForCausalLM:
    """A fresh model. Queries start scaled by 1/sqrt(head_dim): the family's own scale is 1."""
    torch.manual_seed(seed)
    model = Gemma4ForCausalLM(config(size))
    model.generation_config = generation_config()
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(layer.self_attn.head_dim**-0.5)
        layer.post_attention_layernorm.weight.data.fill_(0.3)
        layer.post_feedforward_layernorm.weight.data.fill_(0.3)
        layer.post_per_layer_input_norm.weight.data.fill_(0.1)
    return model


def generation_config() -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=2,
        pad_token_id=0,
        eos_token_id=[1, 106, 50],
        do_sample=True,
        temperature=1.0,
        top_k=64,
        top_p=0.95,
    )


def causal_masks(n: int, window: int = WINDOW) -> dict[str, torch.Tensor | None]:
    """Masks (1, 1, n, n) bool for both layer types; None is plain causal."""
    position = torch.arange(n)
    age = position[:, None] - position[None, :]
    sliding = (age >= 0) & (age < window)
    return {"full_attention": None, "sliding_attention": sliding[None, None]}


class Rows:
    """The packed corpus, one kind of rows after another at random.

    Short exchanges come first: there, what a reply copies is a few ids away, and the heads that
    copy form in a fraction of the time.
    """

    def __init__(self, file: Path, batch_tokens: int, seed: int):
        with np.load(file) as data:
            self.kinds = [(data[f"ids_{kind}"], data[f"mask_{kind}"]) for kind in ROW_TOKENS]
        self.batch_tokens = batch_tokens
        self.shares = EARLY_SHARES
        self.rng = np.random.default_rng(seed)

    @property
    def lengths(self) -> list[int]:
        return [ids.shape[1] for ids, _ in self.kinds]

    def __iter__(self):
        """Yields ids (B, T) int64 and mask (B, T) float32 for ever; T is one of `lengths`."""
        streams = [self.batches(*kind) for kind in self.kinds]
        while True:
            yield next(streams[self.rng.choice(len(streams), p=self.shares)])

    def batches(self, ids: np.ndarray, mask: np.ndarray):
        """Batches of one kind, reshuffled every pass; ids and mask are (N, T)."""
        size = min(len(ids), max(1, self.batch_tokens // ids.shape[1]))
        while True:
            order = self.rng.permutation(len(ids))
            for i in range(0, len(ids) - size + 1, size):
                rows = order[i : i + size]
                batch = torch.from_numpy(ids[rows].astype(np.int64))
                yield batch, torch.from_numpy(mask[rows]).float()


def language_loss(model, ids: torch.Tensor, mask: torch.Tensor, masks: dict) -> torch.Tensor:
    """Cross entropy of the next id where the model speaks, and lightly on a sample of the prompts.

    ids, mask  (B, T); only the sampled positions go through the head, the dearest single matrix
    """
    hidden = model.model(input_ids=ids, attention_mask=masks, use_cache=False).last_hidden_state
    wanted, speaks = ids[:, 1:], mask[:, 1:] > 0
    is_prompt = ~speaks & (wanted != 0) & (torch.rand(wanted.shape) < PROMPT_SAMPLE)
    keep = speaks | is_prompt
    cap = model.config.final_logit_softcapping
    logits = torch.tanh(model.lm_head(hidden[:, :-1][keep]).float() / cap) * cap
    each = F.cross_entropy(logits, wanted[keep], reduction="none")
    weight = torch.where(speaks[keep], 1.0, PROMPT_WEIGHT)
    return (each * weight).sum() / weight.sum()


class Team:
    """This process among the trainers: each takes its own rows, gradients are averaged every step.

    One single-threaded process a core beats one process with many threads: they meet once a step
    instead of once an operation, so a busy machine slows them far less.
    """

    def __init__(self):
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1:
            dist.init_process_group("gloo")

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Replace each tensor by its mean over the team."""
        if self.size == 1:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()

    def agree(self, value: float) -> float:
        """The first process's value: what all act on together."""
        box = torch.tensor([value], dtype=torch.float64)
        if self.size > 1:
            dist.broadcast(box, 0)
        return box.item()


class Optimizer:
    """Muon for the inner matrices, shared out over the team; AdamW for embeddings and norms."""

    def __init__(self, model, team: Team):
        self.team, self.parameters = team, list(model.parameters())
        self.inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        chosen = {id(p) for p in self.inner}
        rest = [p for p in self.parameters if id(p) not in chosen]
        mine = self.inner[team.rank :: team.size]
        self.others = [p for i, p in enumerate(self.inner) if i % team.size != team.rank]
        self.muon = torch.optim.Muon(
            mine, lr=PEAK_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
        )
        self.adam = torch.optim.AdamW(rest, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, factor: float) -> None:
        """Average the gradients, change the weights; `factor` scales the peak rate."""
        self.team.average([p.grad for p in self.parameters])
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for part in (self.muon, self.adam):
            part.param_groups[0]["lr"] = PEAK_RATE * factor
            part.step()
            part.zero_grad(set_to_none=True)
        for parameter in self.others:
            parameter.grad = None
        self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Give every process the matrices that the others have changed."""
        if self.team.size > 1:
            for parameter in self.others:
                parameter.zero_()
            self.team.average(self.inner)
            for parameter in self.inner:
                parameter.mul_(self.team.size)


def rate_factor(done: float) -> float:
    """done  share of the time budget, 0..1. A short warm-up, then a cosine to 2 %."""
    if done < 0.01:
        return max(done, 1e-4) / 0.01
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - 0.01) / 0.99)))


class Clock:
    """Training time so far, over restarts; `done` is its share of the budget."""

    def __init__(self, minutes: float, spent_s: float = 0.0):
        self.budget_s, self.spent_s, self.last = minutes * 60, spent_s, time.perf_counter()

    def tick(self) -> float:
        now = time.perf_counter()
        self.spent_s, self.last = self.spent_s + now - self.last, now
        return self.done

    def pause(self) -> None:
        """Leave out what happened since the last tick (evaluation, saving)."""
        self.last = time.perf_counter()

    @property
    def done(self) -> float:
        return self.spent_s / self.budget_s


def save_state(file: Path, model, optimizer: Optimizer, clock: Clock, tokens: int) -> None:
    """Everything needed to resume, but for Muon's momentum, which is back after a few steps."""
    state = {
        "model": model.state_dict(),
        "adam": optimizer.adam.state_dict(),
        "spent_s": clock.spent_s,
        "tokens": tokens,
    }
    torch.save(state, file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)


def load_state(file: Path, model, optimizer: Optimizer, clock: Clock) -> int:
    """Take up where `save_state` left off. Returns the tokens so far, 0 without a file."""
    if not file.exists():
        return 0
    state = torch.load(file)
    model.load_state_dict(state["model"])
    optimizer.adam.load_state_dict(state["adam"])
    clock.spent_s = state["spent_s"]
    return state["tokens"]


def save_pretrained(model, folder: Path) -> None:
    """Write the weights as bfloat16 in Hugging Face's own layout; training goes on in float32."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.to(torch.bfloat16).save_pretrained(folder)


def train_loop(model, file: Path, rows: Rows, minutes: float, team: Team, loss_of, report) -> dict:
    """Step until the budget is used, resuming from `file`; the first process saves and reports.

    loss_of  (ids, mask) of one batch -> scalar loss
    report   called with the model every REPORT_S, outside the budget

    Returns {"minutes", "tokens", "loss"}.
    """
    optimizer, clock = Optimizer(model, team), Clock(minutes)
    tokens = load_state(file, model, optimizer, clock)
    rows.rng = np.random.default_rng([tokens, team.rank])  # never the same batches again
    smooth, next_line, next_report = None, 0.0, clock.spent_s + REPORT_S
    for ids, mask in rows:
        done = team.agree(clock.tick())
        if done >= 1:
            break
        rows.shares = EARLY_SHARES if done < EARLY_UNTIL else LATE_SHARES
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ids, mask)
        loss.backward()
        optimizer.step(rate_factor(done))
        tokens += ids.numel() * team.size
        smooth = loss.item() if smooth is None else 0.97 * smooth + 0.03 * loss.item()
        if team.rank == 0 and clock.spent_s >= next_line:
            next_line = clock.spent_s + 20
            print(f"{clock.spent_s:6.0f} s  {tokens:10,} tokens  loss {smooth:.4f}", flush=True)
        if team.rank == 0 and clock.spent_s >= next_report:
            next_report = clock.spent_s + REPORT_S
            save_state(file, model, optimizer, clock, tokens)
            report(model)
            clock.pause()
    if team.rank == 0:
        save_state(file, model, optimizer, clock, tokens)
    return {"minutes": clock.spent_s / 60, "tokens": tokens, "loss": smooth}


def train(rows: Rows, folder: Path, minutes: float, team: Team, size: str, report) -> dict:
    """Train the target into `folder`/target; see train_loop."""
    model = create(size)
    masks = {n: causal_masks(n) for n in rows.lengths}

    def loss_of(ids, mask):
        return language_loss(model, ids, mask, masks[ids.shape[1]])

    result = train_loop(model, folder / "target.pt", rows, minutes, team, loss_of, report)
    if team.rank == 0:
        save_pretrained(model, folder / "target")
    return result
