"""Log-probs are the plain model's for other architectures too: windows, sinks, soft caps, latent attention, experts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from miles_engines.local_server import model as models
from miles_engines.local_server.job import Job
from miles_engines.local_server.prefix_cache import PrefixCache
from miles_engines.local_server.sampling import Sampler, SamplingParams
from miles_engines.local_server.scheduler import Scheduler
from miles_engines.local_server.settings import Settings
from miles_engines.local_server.stops import StopStrings

COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 24, "qk_nope_head_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 16},
    "Glm4MoeConfig": {**EXPERTS, "head_dim": 16},
    "DeepseekV3Config": {**EXPERTS, **LATENT, "num_key_value_heads": 4},
    "GptOssConfig": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "Gemma2Config": {"head_dim": 16, "sliding_window": 16},
}


def prompt(length: int, start: int) -> list[int]:
    return [(start + 7 * index * index + 3 * index) % 290 for index in range(length)]


async def generated(model: models.Model) -> list[Job]:
    """Jobs of different lengths together, then one on top of the first."""
    loop = asyncio.get_running_loop()
    scheduler = Scheduler(model, Sampler(model.device, seed=0), PrefixCache(), loop, prefill_chunk=24, max_batch=3)
    scheduler.start()

    def job(ids: list[int]) -> Job:
        return Job(rid="", prompt=ids, params=SamplingParams(max_new_tokens=8, temperature=0.8), stops=StopStrings())

    jobs = [job(prompt(length, start)) for start, length in enumerate((30, 5, 40, 11))]
    for one in jobs:
        scheduler.submit(one)
    async with asyncio.timeout(30):
        await asyncio.gather(*(one.result() for one in jobs))
        jobs.append(job(jobs[0].prompt + jobs[0].output_ids + prompt(5, 9)))
        scheduler.submit(jobs[-1])
        await jobs[-1].result()
    scheduler.stop()
    assert jobs[-1].cached_tokens == 37
    return jobs


@pytest.mark.parametrize("name", CONFIGS)
async def test_logprobs(name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, name)(**{**COMMON, **CONFIGS[name]})
        network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    network.save_pretrained(tmp_path)
    settings = Settings(model=tmp_path, checkpoint=tmp_path, tito_model="qwen3", device="cpu")
    for one in await generated(models.load(settings, lambda text: None)):
        assert one.finish == {"type": "length", "length": 8}
        with torch.inference_mode():
            logits = network(torch.tensor([one.prompt + one.output_ids])).logits[0].float()
        expected = torch.log_softmax(logits / 0.8, -1)
        for index, (token, logprob) in enumerate(zip(one.output_ids, one.logprobs, strict=True), len(one.prompt) - 1):
            assert logprob == pytest.approx(float(expected[index, token]), abs=1e-4)
