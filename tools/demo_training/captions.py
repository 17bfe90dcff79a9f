"""Captions as the transformer meets them: the tokenizer, and the token ids of captions.

Owns the chat template and the number of tokens. Everything else about the tokenizer is Qwen2's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from shardwise.demo.world import caption, sample_scene

from .settings import TokenizerSettings

TOKENS = 16
"""How many tokens every caption is padded to; the longest one takes 13."""

START, END, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '" + START + "' + message.content + '" + END + "' }}{%- endfor %}"
)


def train_tokenizer(settings: TokenizerSettings, rng: Random) -> Qwen2Tokenizer:
    """Train a byte-level tokenizer that knows every word of the captions as one token."""
    captions = [caption(sample_scene(rng)) for _ in range(settings.captions)]
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary - len((START, END, PADDING)),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(captions, trainer)
    return _as_qwen2(bpe)


def _as_qwen2(bpe: Tokenizer) -> Qwen2Tokenizer:
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token=END,
        pad_token=PADDING,
        extra_special_tokens=[START],
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tokenize(tokenizer: Qwen2Tokenizer, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Turn captions into token ids and their attention mask, as `Flux2KleinPipeline` does."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        for text in captions
    ]
    tokens = tokenizer(texts, return_tensors="pt", padding="max_length", truncation=True, max_length=TOKENS)
    return tokens["input_ids"], tokens["attention_mask"]
