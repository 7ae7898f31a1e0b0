"""A tiny random Qwen3 with a small byte-level tokenizer, written to disk as a checkpoint is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Hidden in text; `<|im_end|>` ends a turn."""

PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""One token each, but kept in text."""

VOCABULARY = 512
"""Of the config; the tokenizer has fewer ids, as padded checkpoints do."""

CORPUS = (
    "system user assistant tool The quick brown fox jumps over the lazy dog. What is the weather in Paris?",
    '{"name": "get_weather", "arguments": {"city": "Paris"}} You may call one or more functions.',
    "Answer yes or no. 0 1 2 3 4 5 6 7 8 9 plus minus times is and of to in a b c",
)


def build_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE with a few merges, then Qwen3's added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return tokenizer


def write_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer's files, without a model."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(facts), "utf-8")
    return tokenizer


def write_model(directory: Path, *, seed: int = 0, **config: Any) -> Path:
    """A whole checkpoint: two layers, hidden size 64, random weights, context 512; `config` overrides."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = write_tokenizer(directory)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Qwen3ForCausalLM(Qwen3Config(**{**settings, **config}))
    network.save_pretrained(directory)
    # random weights rarely stop by themselves; a default of transformers would add sampling parameters
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": settings["eos_token_id"]}), "utf-8")
    return directory
