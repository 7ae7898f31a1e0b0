"""Make the tiny Qwen3 model from demonstrations: write `model/` and `prompts.jsonl`.

python examples/tiny/make_model.py
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from chat import GENERATION_PROMPT, bind, make_chat, mark_sampled, shared_start
from task import make_prompts
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from vocabulary import END_OF_TEXT, TURN_END, save_tokenizer, train_tokenizer, untrained_tokenizer

from miles_core.tito import BoundFamily
from rollout import outcomes, run_rollouts, success_rate

VOCABULARY_SIZE = 512
MAX_LENGTH = 2048
PROMPTS = 64
POOL = 64  # batches drawn, then sorted by length, at a time


@dataclass(frozen=True)
class Batch:
    """Chats after their shared tools turn; `sampled` marks what the model writes."""

    ids: torch.Tensor
    sampled: torch.Tensor


def build_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        bos_token_id=None,
        dtype="float32",
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return model


def make_batches(
    model: Qwen3ForCausalLM, family: BoundFamily, args: argparse.Namespace, held_out: set[str]
) -> Iterator[Batch]:
    """Batches of chats of like length, without end."""
    rng = random.Random(args.seed)
    start = len(shared_start(family))
    opening = family.encode(GENERATION_PROMPT)
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    while True:
        texts = [make_chat(family, rng, args.slips, held_out) for _ in range(POOL * args.batch)]
        rows = sorted((family.encode(text)[start:] for text in texts), key=len)
        groups = [rows[at : at + args.batch] for at in range(0, len(rows), args.batch)]
        rng.shuffle(groups)
        for group in groups:
            width = max(map(len, group))
            ids = [row + [pad] * (width - len(row)) for row in group]
            marks = [mark_sampled(row, opening, end) for row in ids]
            yield Batch(torch.tensor(ids), torch.tensor(marks))


def batch_loss(model: Qwen3ForCausalLM, start: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the sampled ids; the tools turn is run once for all chats."""
    cache = model.model(start[None], use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(batch.ids))
    hidden = model.model(batch.ids[:, :-1], past_key_values=cache).last_hidden_state
    where = batch.sampled[:, 1:]
    return functional.cross_entropy(model.lm_head(hidden[where]), batch.ids[:, 1:][where])


def train(model: Qwen3ForCausalLM, family: BoundFamily, args: argparse.Namespace, held_out: set[str]) -> None:
    """`args.steps` steps of AdamW: warm-up, then a cosine down to zero."""
    start = torch.tensor(shared_start(family))
    batches = make_batches(model, family, args, held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    began = time.monotonic()
    model.train()
    for step in range(args.steps):
        warm = min((step + 1) / 100, 1.0)
        decay = 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * warm * decay
        loss = batch_loss(model, start, next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - began:5.0f} s", flush=True)
    model.eval()


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, MAX_LENGTH)


def report(model: Qwen3ForCausalLM, family: BoundFamily, prompts: list[dict[str, Any]], seeds: list[int]) -> None:
    """Print the success rate at temperature 1, four samples a prompt."""
    for seed in seeds:
        rollouts = run_rollouts(model, family, prompts, 4, seed=seed)
        print(f"seed {seed}: success {success_rate(rollouts):.3f}  {outcomes(rollouts)}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--slips", type=float, default=0.1, help="share of chats with a slip")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    began = time.monotonic()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    prompts = make_prompts(PROMPTS, random.Random(args.seed + 1))
    held_out = {line["metadata"]["expression"] for line in prompts}
    rng = random.Random(args.seed + 2)
    bare = bind(untrained_tokenizer())
    texts = [make_chat(bare, rng, args.slips, held_out) for _ in range(3000)]
    tokenizer = train_tokenizer(texts, VOCABULARY_SIZE)
    family = bind(tokenizer)
    model = build_model(tokenizer)
    print(f"{model.num_parameters()} parameters, {tokenizer.get_vocab_size()} ids")
    train(model, family, args, held_out)
    save(model, tokenizer, args.out / "model")
    lines = "".join(json.dumps(line) + "\n" for line in prompts)
    (args.out / "prompts.jsonl").write_text(lines)
    print(f"trained in {time.monotonic() - began:.0f} s ({time.process_time():.0f} s of CPU time)")
    report(model, family, prompts, seeds=[1, 2, 3, 4, 5])


if __name__ == "__main__":
    main()
