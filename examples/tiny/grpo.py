"""Group-relative policy optimisation: updates of a model's weights from the samples of its own rollouts."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from serving import reward_of
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from miles_core import MilesError, Sample

BATCH = 32
"""Samples in one pass of the model."""

CLIP = 0.2
"""How far the ratio of a token's new and old probability may leave 1, as it does from a step's second update on."""

UPDATES = 2
"""Of the weights in one step: its groups are dealt to so many."""

SHARPNESS = 80.0
"""How much faster the last norm's gains learn. They say how far apart the logits are: most of what the model gets wrong
at temperature 1 it would get right at a lower one."""

WARM_UP = 3
"""Steps before the rate is at its highest: the first gradients tell the optimizer how large they are."""

MOST_DIFFERENCE = 1e-3
"""Between two log-probs of one token, the trainer's and the rollout's; more than that is a fault."""


class OffPolicyError(MilesError):
    """The samples are not of the weights being trained; nothing was updated."""


@dataclass(frozen=True)
class Update:
    """What one step did. `difference` is the largest one between log-probs, over `tokens` sampled tokens."""

    difference: float
    tokens: int
    gradient: float
    """Norm, before it is clipped to 1; the largest one of the step."""


@dataclass(frozen=True)
class Batch:
    """Samples padded on the right, and what is known of each sampled token, row by row."""

    ids: torch.Tensor
    """int64 `[rows, width]`."""
    sampled: torch.Tensor
    """bool `[rows, width]`: where the model sampled; false in the first column."""
    rollout: torch.Tensor
    """float32 `[sampled tokens]`: their log-probs in the rollout."""
    advantages: torch.Tensor
    """float32 `[sampled tokens]`: the advantages of their samples."""

    @property
    def shared(self) -> int:
        """How many ids, none of them sampled, all rows begin with."""
        same = (self.ids == self.ids[0]).all(0) & ~self.sampled.any(0)
        return int(same.long().cumprod(0).sum())


def advantages_of(samples: Sequence[Sample]) -> list[float]:
    """Each reward against those of its group, in standard deviations; 0 where a group's rewards are all the same."""
    groups: dict[int | None, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_index].append(reward_of(sample))
    result = []
    for sample in samples:
        rewards = torch.tensor(groups[sample.group_index], dtype=torch.float64)
        spread = rewards.std(correction=0).item()
        result.append((reward_of(sample) - rewards.mean().item()) / spread if spread else 0.0)
    return result


def batches_of(samples: Sequence[Sample], advantages: Sequence[float], pad: int) -> Iterator[Batch]:
    """Samples of like length together; those without an advantage apart, since nothing is learned of them."""
    order = sorted(range(len(samples)), key=lambda at: (advantages[at] == 0.0, len(samples[at].tokens)))
    learned = sum(advantage != 0.0 for advantage in advantages)
    for part in (order[:learned], order[learned:]):
        for start in range(0, len(part), BATCH):
            chosen = part[start : start + BATCH]
            yield _batch([samples[at] for at in chosen], [advantages[at] for at in chosen], pad)


def _batch(samples: Sequence[Sample], advantages: Sequence[float], pad: int) -> Batch:
    width = max(len(sample.tokens) for sample in samples)
    ids = torch.full((len(samples), width), pad)
    sampled = torch.zeros((len(samples), width), dtype=torch.bool)
    rollout = torch.zeros((len(samples), width))
    for row, sample in enumerate(samples):
        sample.validate()
        end = len(sample.tokens)
        response = slice(end - sample.response_length, end)
        ids[row, :end] = torch.tensor([int(token) for token in sample.tokens])
        sampled[row, response] = torch.tensor([bool(on) for on in sample.loss_mask or ()])
        rollout[row, response] = torch.tensor([float(value) for value in sample.rollout_log_probs or ()])
    spread = torch.tensor(advantages)[:, None].expand(-1, width)
    return Batch(ids, sampled, rollout[sampled], spread[sampled])


class Trainer:
    """The model in float32, and its optimizer: its rate rises over the first steps, then falls to 0 at the last."""

    def __init__(self, model: Path, rate: float, steps: int) -> None:
        logging.disable_progress_bar()
        self._network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._tokenizer = [model / "tokenizer.json", model / "tokenizer_config.json"]
        sharpness = self._network.model.norm.weight
        others = [weight for weight in self._network.parameters() if weight is not sharpness]
        groups = [{"params": others}, {"params": [sharpness], "lr": SHARPNESS * rate}]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / (WARM_UP + 1), 1 - step / steps)
        )

    def update(self, samples: Sequence[Sample]) -> Update:
        """A few steps of the optimizer. Raises OffPolicyError, and leaves the weights, if the log-probs differ."""
        parts = self._parts(samples)
        worst = max(self._check(batch) for part in parts for batch in part)
        if not worst < MOST_DIFFERENCE:
            raise OffPolicyError(
                f"log-probs of the trainer and the rollout differ by {worst:.2g}, at most {MOST_DIFFERENCE:g} is "
                "expected: the engine does not have the trainer's weights, or computes in another precision"
            )
        gradients = [self._learn(part) for part in parts]
        self._schedule.step()
        tokens = sum(len(batch.rollout) for part in parts for batch in part)
        return Update(worst, tokens, max(gradients))

    def _parts(self, samples: Sequence[Sample]) -> list[list[Batch]]:
        """Whole groups, dealt to so many updates."""
        advantages = advantages_of(samples)
        groups = sorted({sample.group_index or 0 for sample in samples})
        part_of = {group: at % UPDATES for at, group in enumerate(groups)}
        parts: list[list[int]] = [[] for _ in range(min(UPDATES, len(groups)))]
        for at, sample in enumerate(samples):
            parts[part_of[sample.group_index or 0]].append(at)
        pad = self._network.config.pad_token_id
        return [list(batches_of([samples[at] for at in part], [advantages[at] for at in part], pad)) for part in parts]

    def _check(self, batch: Batch) -> float:
        with torch.no_grad():
            return largest_difference(self.log_probs(batch), batch)

    def _learn(self, part: Sequence[Batch]) -> float:
        """One step of the optimizer; the norm of its gradient."""
        count = sum(len(batch.rollout) for batch in part)
        self._optimizer.zero_grad()
        for batch in part:
            if batch.advantages.any():
                (policy_loss(self.log_probs(batch), batch) / count).backward()
        gradient = torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0).item()
        self._optimizer.step()
        return gradient

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Of every sampled token, given all before it: float32 `[sampled tokens]`.

        What all rows begin with is read once. Filling is on the right, where no sampled token looks.
        """
        start = batch.shared - 1  # the last one again: it predicts
        ids, cache = batch.ids, None
        if start > 0:
            cache = self._network.model(ids[:1, :start], use_cache=True).past_key_values
            cache.batch_repeat_interleave(len(ids))
        start = max(start, 0)
        hidden = self._network.model(ids[:, start:-1], past_key_values=cache).last_hidden_state
        sampled = batch.sampled[:, start + 1 :]
        logits = self._network.lm_head(hidden[sampled]).float()
        chosen = logits.gather(-1, ids[:, start + 1 :][sampled][:, None])[:, 0]
        result: torch.Tensor = chosen - logits.logsumexp(-1)
        return result

    def save(self, folder: Path) -> None:
        """Write weights and tokenizer, each file in one go: an engine may have the files before them still open."""
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as fresh:
            self._network.save_pretrained(fresh)
            for file in self._tokenizer:
                shutil.copy(file, fresh)
            for file in Path(fresh).iterdir():
                os.replace(file, folder / file.name)


def largest_difference(log_probs: torch.Tensor, batch: Batch) -> float:
    """Between the trainer's log-probs and the rollout's; that of a NaN is infinite."""
    gap = (log_probs.detach() - batch.rollout).abs()
    return gap.nan_to_num(nan=torch.inf).max().item() if gap.numel() else 0.0


def policy_loss(log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The clipped objective, negated and summed over the sampled tokens."""
    ratio = (log_probs - batch.rollout).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).sum()
