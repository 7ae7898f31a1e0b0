"""Sampling parameters, and drawing one token for every row of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

GREEDY_BELOW = 1e-6
"""Temperatures under this mean greedy, as in SGLang; the log-prob is then that of temperature 1."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling parameters, checked and with defaults filled in."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    top_logprobs: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed by what has been said, or by a bias."""
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without drawing."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def divisor(self) -> float:
        """What logits are divided by."""
        return 1.0 if self.temperature < GREEDY_BELOW else self.temperature

    @property
    def cuts(self) -> bool:
        """Whether some tokens are excluded by top-p, top-k or min-p."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 1 or self.min_p > 0)


@dataclass(frozen=True)
class Row:
    """One sequence's part in a draw: its parameters, and ids not allowed now.

    `tokens` are all of the sequence, `sampled` the generated ones: penalties look at them, and a seeded row's noise is
    that of its position, `len(tokens)`.
    """

    params: SamplingParams
    banned: Sequence[int] = ()
    tokens: Sequence[int] = ()
    sampled: Sequence[int] = ()


@dataclass(frozen=True)
class Drawn:
    """A token per row with its log-probability, and per row the likeliest ones where asked for."""

    ids: list[int]
    logprobs: list[float]
    tops: list[list[tuple[float, int]]] = field(default_factory=list)


class Sampler:
    """Draws tokens; log-probabilities are those before top-p, top-k and min-p cut anything."""

    def __init__(self, device: torch.device, *, scaled_logprobs: bool = True, seed: int | None = None) -> None:
        self._device = device
        self._scaled = scaled_logprobs
        self._generator, self._seeded = torch.Generator(device), torch.Generator(device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> Drawn:
        """Draw one token per row of `[rows, vocabulary]` float32 logits."""
        with torch.inference_mode():
            return self._draw(logits, rows)

    def _draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> Drawn:
        logits = _adjusted(logits, rows)
        divisors = [row.params.divisor for row in rows]
        scaled = logits
        if any(divisor != 1.0 for divisor in divisors):
            scaled = logits / torch.tensor(divisors, device=self._device)[:, None]
        logp = torch.log_softmax(scaled, dim=-1)
        ids = self._choose(self._allowed(logp, rows), rows)
        reported = logp if self._scaled or scaled is logits else torch.log_softmax(logits, dim=-1)
        chosen = reported.gather(1, ids[:, None])[:, 0]
        return Drawn(ids.tolist(), chosen.tolist(), _tops(reported, rows))

    def _choose(self, logp: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        greedy = [index for index, row in enumerate(rows) if row.params.greedy]
        seeded = [index for index, row in enumerate(rows) if row.params.seed is not None and not row.params.greedy]
        if len(greedy) == len(rows):
            return logp.argmax(dim=-1)
        if len(greedy) + len(seeded) == len(rows):
            ids = torch.empty(len(rows), dtype=torch.long, device=self._device)
        else:
            ids = self._by_cumulation(logp)
        if greedy:
            ids[greedy] = logp[greedy].argmax(dim=-1)
        for index in seeded:
            ids[index] = self._by_gumbel(logp[index], rows[index])
        return ids

    def _by_cumulation(self, logp: torch.Tensor) -> torch.Tensor:
        """One draw per row from one uniform number per row."""
        cumulated = logp.double().exp().cumsum(dim=-1)
        total = cumulated[:, -1:]
        uniform = torch.rand(total.shape, dtype=total.dtype, device=self._device, generator=self._generator)
        # strictly below the total, and strictly above what is left of it: never a token of probability 0
        point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulated, point, right=True)[:, 0]

    def _by_gumbel(self, logp: torch.Tensor, row: Row) -> torch.Tensor:
        """The argmax of `logp` plus Gumbel noise is a draw from it.

        Slower, but it does not change with the rounding errors that cumulating over a vocabulary adds up,
        so a seeded request repeats in whatever batch it runs. The noise is of seed and position, as SGLang's is:
        turns that a session sends with one seed do not share it, and a sequence that is gone on with draws as if it
        had never been stopped.
        """
        self._seeded.manual_seed(_mixed(row.params.seed or 0, len(row.tokens)))
        noise = torch.empty_like(logp).exponential_(generator=self._seeded)
        return (logp - noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_()).argmax(dim=-1)

    def _allowed(self, logp: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """`logp` with minus infinity on what may not be drawn; `logp` itself where all may."""
        if any(row.banned for row in rows):
            logp = logp.clone()
            for index, row in enumerate(rows):
                logp[index, list(row.banned)] = -torch.inf
        cutting = [index for index, row in enumerate(rows) if row.params.cuts]
        if not cutting:
            return logp
        where = torch.tensor(cutting, device=self._device)
        out = logp.clone()
        out[where] = self._cut(logp[where], [rows[index].params for index in cutting])
        return out

    def _cut(self, logp: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """Keep what is in the top k and in the smallest set with mass top_p and allowed by min_p, as SGLang."""
        size = logp.shape[1]
        counts = [p.top_k if 0 < p.top_k < size else size for p in params]
        ordered, order = logp.topk(max(counts), dim=-1)
        rank = torch.arange(ordered.shape[1], device=self._device)
        keep = rank < torch.tensor(counts, device=self._device)[:, None]
        probs = ordered.exp()
        before = probs.cumsum(dim=-1) - probs
        keep &= before < torch.tensor([p.top_p for p in params], device=self._device)[:, None]
        least = torch.tensor([p.min_p for p in params], device=self._device)[:, None] * probs[:, :1]
        keep &= probs >= least
        keep[:, 0] = True
        return torch.full_like(logp, -torch.inf).scatter_(1, order, torch.where(keep, ordered, -torch.inf))


def _mixed(seed: int, position: int) -> int:
    """One number of 63 bits for both, without a pattern (the finalizer of SplitMix64, twice)."""
    mixed = 0
    for part in (seed, position):
        mixed = (mixed + part + 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1


def _adjusted(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Logits with penalties and biases, as SGLang: before the temperature, and part of the log-probs."""
    changed = [index for index, row in enumerate(rows) if row.params.adjusts]
    if not changed:
        return logits
    logits = logits.clone()
    for index in changed:
        _adjust(logits[index], rows[index])
    return logits


def _adjust(logits: torch.Tensor, row: Row) -> None:
    params = row.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.tokens)), dtype=torch.long, device=logits.device)
        values, factor = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    ids, counts = torch.tensor(list(row.sampled), dtype=torch.long, device=logits.device).unique(return_counts=True)
    logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias


def _tops(logp: torch.Tensor, rows: Sequence[Row]) -> list[list[tuple[float, int]]]:
    most = max(row.params.top_logprobs for row in rows)
    if not most:
        return []
    values, ids = logp.topk(min(most, logp.shape[1]), dim=-1)
    pairs = zip(values.tolist(), ids.tolist(), strict=True)
    return [list(zip(v, i, strict=True))[: row.params.top_logprobs] for (v, i), row in zip(pairs, rows, strict=True)]
