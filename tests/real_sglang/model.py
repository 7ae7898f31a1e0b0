"""A random Qwen3 with the family's real tokenizer and chat template: small, and every id as in the real ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import real_tokenizers

VOCABULARY = 151936
"""Of the config, as Qwen3's: more than the tokenizer has."""

CONTEXT = 4096


def write_model(directory: Path, *, seed: int = 0) -> Path:
    """A whole checkpoint, about 80 MB of float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    for file in real_tokenizers.checkpoint("qwen3").iterdir():
        shutil.copy(file, directory / file.name)
    templates = Path(__file__).parents[2] / "plugins" / "tito_families" / "miles_tito_families" / "templates"
    facts = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    facts["chat_template"] = (templates / "qwen3.jinja").read_text("utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(facts), "utf-8")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=151645,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Qwen3ForCausalLM(config)
    network.save_pretrained(directory)
    # transformers would add sampling parameters of its own
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}), "utf-8")
    return directory
