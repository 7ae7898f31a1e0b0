"""Drawing tokens: which may be drawn, how often, and the log-probability that is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from miles_engines.local_server.sampling import Row, Sampler, SamplingParams

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def params(**values: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=8, **values)


def draws(count: int, given: SamplingParams, *, seed: int = 1) -> torch.Tensor:
    """How often each token is drawn, as shares."""
    sampler = Sampler(CPU, seed=seed)
    drawn = sampler.draw(LOGITS.expand(count, -1), [Row(given)] * count)
    return torch.bincount(torch.tensor(drawn.ids), minlength=len(LOGITS)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_shares_and_logprobs_follow_the_scaled_distribution(temperature: float) -> None:
    given = params(temperature=temperature)
    expected = torch.log_softmax(LOGITS / temperature, -1)
    torch.testing.assert_close(draws(40000, given), expected.exp(), atol=0.01, rtol=0)
    drawn = Sampler(CPU).draw(LOGITS[None], [Row(given)])
    assert drawn.logprobs[0] == pytest.approx(float(expected[drawn.ids[0]]), abs=1e-6)


def test_unscaled_logprobs_are_of_temperature_one() -> None:
    sampler = Sampler(CPU, scaled_logprobs=False)
    drawn = sampler.draw(LOGITS[None], [Row(params(temperature=0.3))])
    assert drawn.logprobs[0] == pytest.approx(float(torch.log_softmax(LOGITS, -1)[drawn.ids[0]]), abs=1e-6)


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1e-9}, {"top_k": 1}])
def test_greedy(given: dict[str, Any]) -> None:
    drawn = Sampler(CPU).draw(LOGITS[None], [Row(params(**given))])
    assert drawn.ids == [0]
    assert drawn.logprobs[0] == pytest.approx(float(torch.log_softmax(LOGITS, -1)[0]), abs=1e-6)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.75}, 2),
        ({"top_p": 1.0}, 6),
        ({"min_p": 0.3}, 2),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.2}, 3),
    ],
)
def test_cuts_exclude_tokens_but_not_from_the_logprob(given: dict[str, Any], allowed: int) -> None:
    shares = draws(20000, params(**given))
    expected = torch.softmax(LOGITS, -1)
    expected[allowed:] = 0
    torch.testing.assert_close(shares, expected / expected.sum(), atol=0.015, rtol=0)
    drawn = Sampler(CPU).draw(LOGITS[None], [Row(params(**given))])
    assert drawn.logprobs[0] == pytest.approx(float(torch.log_softmax(LOGITS, -1)[drawn.ids[0]]), abs=1e-6)


def test_a_seed_gives_the_same_draws_in_any_batch() -> None:
    sampler = Sampler(CPU)

    def sequence(others: int) -> list[int]:
        drawn = []
        for position in range(30):
            rows = [Row(params())] * others + [Row(params(seed=7), tokens=range(position))]
            drawn.append(sampler.draw(LOGITS.expand(others + 1, -1), rows).ids[-1])
        return drawn

    assert sequence(0) == sequence(5) == sequence(2)


def test_seeded_shares_follow_the_distribution() -> None:
    """Over the positions of one sequence, and over the seeds at one position."""
    rows = [Row(params(seed=3), tokens=range(position)) for position in range(20000)]
    rows += [Row(params(seed=seed), tokens=range(9)) for seed in range(20000)]
    drawn = torch.tensor(Sampler(CPU).draw(LOGITS.expand(40000, -1), rows).ids)
    for ids in (drawn[:20000], drawn[20000:]):
        shares = torch.bincount(ids, minlength=len(LOGITS)) / 20000
        torch.testing.assert_close(shares, torch.softmax(LOGITS, -1), atol=0.015, rtol=0)


def test_noise_of_one_seed_is_not_that_of_the_next_one_or_of_the_next_position() -> None:
    flat = torch.zeros(1000)
    rows = [Row(params(seed=seed), tokens=range(at)) for seed in range(-3, 30) for at in range(30)]
    ids = torch.tensor(Sampler(CPU).draw(flat.expand(len(rows), -1), rows).ids).reshape(33, 30)
    for moved in (ids[1:, :-1] == ids[:-1, 1:], ids[1:] == ids[:-1], ids[:, 1:] == ids[:, :-1]):
        assert moved.float().mean() < 0.02, "independent draws of 1000 are equal once in 1000"


def test_rows_of_all_kinds_together() -> None:
    sampler = Sampler(CPU)
    kinds = [
        params(temperature=0.0),
        params(),
        params(seed=1),
        params(top_k=2, temperature=2.0),
        params(top_logprobs=2),
    ]
    rows = [Row(kind) for kind in kinds]
    drawn = sampler.draw(LOGITS.expand(5, -1), rows)
    assert drawn.ids[0] == 0
    assert drawn.ids[3] in (0, 1)
    assert [len(top) for top in drawn.tops] == [0, 0, 0, 0, 2]
    assert [token for _, token in drawn.tops[4]] == [0, 1]


def test_banned_tokens_are_not_drawn_and_change_no_logprob() -> None:
    drawn = Sampler(CPU).draw(LOGITS[None], [Row(params(temperature=0.0), banned=(0,))])
    assert drawn.ids == [1]
    assert drawn.logprobs[0] == pytest.approx(float(torch.log_softmax(LOGITS, -1)[1]), abs=1e-6)


def test_extreme_logits_give_finite_logprobs() -> None:
    logits = torch.tensor([[300.0, -300.0, 0.0]])
    for temperature in (0.0, 1e-3, 1.0, 100.0):
        drawn = Sampler(CPU).draw(logits, [Row(params(temperature=temperature))])
        assert all(torch.isfinite(torch.tensor(drawn.logprobs)))


def test_penalties_and_bias_change_logits_before_the_temperature() -> None:
    given = params(
        temperature=2.0, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5, logit_bias=((5, 4.0),)
    )
    drawn = Sampler(CPU).draw(LOGITS[None], [Row(given, tokens=[4, 0, 1, 1], sampled=[1, 1])])
    expected = torch.tensor([2.0 / 1.5, 1.0 / 1.5 - 1.25, 0.5, 0.0, -1.5, 1.0])
    assert drawn.logprobs[0] == pytest.approx(float(torch.log_softmax(expected / 2, -1)[drawn.ids[0]]), abs=1e-6)


def test_neutral_penalties_change_nothing() -> None:
    assert not params(frequency_penalty=0.0, repetition_penalty=1.0).adjusts
