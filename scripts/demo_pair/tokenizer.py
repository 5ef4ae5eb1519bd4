"""The demo pair's byte-level BPE tokenizer, with the family's control tokens at their real ids."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
FIRST_BYTE_ID = 128  # below it: control tokens and reserved rows
CONTROL_IDS = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<unk>": 3,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
}


def reserved_tokens() -> dict[str, int]:
    """Every id below FIRST_BYTE_ID: the control tokens, and <unusedN> in between."""
    by_id = {i: token for token, i in CONTROL_IDS.items()}
    return {by_id.get(i, f"<unused{i}>"): i for i in range(FIRST_BYTE_ID)}


def splitter() -> pre_tokenizers.PreTokenizer:
    """Single digits, so that counting carries over to numbers never seen; then GPT-2's words."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges on `texts` without control tokens; move them above the reserved ids."""
    control = re.compile("|".join(re.escape(token) for token in CONTROL_IDS))
    plain = (piece for text in texts for piece in control.split(text) if piece)
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = splitter()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - FIRST_BYTE_ID,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator(plain, trainer)
    return with_reserved_ids(json.loads(learned.to_str())["model"])


def with_reserved_ids(model: dict) -> Tokenizer:
    """model  the trained BPE as tokenizers serialises it: {"vocab": …, "merges": …}"""
    vocab = reserved_tokens()
    for token in sorted(model["vocab"], key=model["vocab"].get):
        vocab[token] = len(vocab)
    filler = (f"<unused{i}>" for i in range(FIRST_BYTE_ID, VOCAB_SIZE))
    while len(vocab) < VOCAB_SIZE:  # a tiny corpus may have too few merges
        vocab[next(filler)] = len(vocab)
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter()
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(t, special=True, normalized=False) for t in CONTROL_IDS]
    tokenizer.add_special_tokens(specials)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, template: str) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja by transformers."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=template,
    )
    wrapped.save_pretrained(folder)
