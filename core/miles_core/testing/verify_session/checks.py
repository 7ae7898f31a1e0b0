"""The checks of a turn and of samples: pure, each gives the faults it finds in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.testing.verify.results import first_difference
from miles_core.testing.verify.sampling import says_nothing
from miles_core.testing.verify_session.client import Answer
from miles_core.tito import BoundFamily
from miles_core.types import Json, Message, Tool

COMPLETED = ("stop", "tool_calls")


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One turn of a session: what it extends, what was appended, what came. `prompt_ids` are None if not seen yet."""

    parent: Turn | None
    appended: tuple[Message, ...]
    answer: Answer
    prompt_ids: list[int] | None
    ids: list[int] | None
    log_probs: list[float] | None
    forced: bool
    seen: int | None = None
    """How many `assistant_text` differences the session shows, if it was looked at."""

    @property
    def conversation(self) -> list[Message]:
        """All messages, the answer's included."""
        before = self.parent.conversation if self.parent is not None else []
        return [*before, *self.appended, self.answer.message]

    @property
    def checkpoint(self) -> list[int] | None:
        """Prompt and sampled ids, if both were seen."""
        return None if self.prompt_ids is None or self.ids is None else [*self.prompt_ids, *self.ids]

    @property
    def path(self) -> list[Turn]:
        """The turns from the first one to this."""
        return [*(self.parent.path if self.parent is not None else []), self]


def call_not_read(bound: BoundFamily, turn: Turn, tools: Sequence[Tool]) -> bool:
    """Whether the sampled ids are a call to the family's parser, and the engine's message has none."""
    if turn.answer.message.get("tool_calls") or not turn.ids or turn.prompt_ids is None:
        return False
    parser = bound.parser(list(tools), prompt_ids=turn.prompt_ids)
    parser.feed(turn.ids)
    parser.finish()
    return bool(parser.message().get("tool_calls"))


def strays(bound: BoundFamily, turn: Turn) -> bool:
    """Whether the model sampled what no message says, so that history writes the turn otherwise.

    That is a control token inside a turn, or at its end one that ends none; and nothing said at all, where the family
    declares that history leaves such a turn out. It is the model's doing, not the family's.
    """
    if "empty" in bound.family.sampled_otherwise and says_nothing(turn.answer.message):
        return True
    ids = turn.ids or []
    ends = {*bound.stop_ids, *bound.tokenizer.ids_of(bound.family.role_stop_tokens, needed_by=bound.name)}
    inside = ids[:-1] if ids and ids[-1] in ends else ids
    return any(token in bound.boundary_ids for token in inside)


def recorded_turn(view: Json, parent: Turn | None, appended: Sequence[Message], answer: Answer, forced: bool) -> Turn:
    """The turn as the session's last record has it, with what the answer tells where the record is another's."""
    record = view["records"][-1]
    mine = record["response"].get("id") == answer.id
    pairs = record["response"]["choices"][0]["meta_info"]["output_token_logprobs"] if mine else None
    differences = view["metadata"].get("tito_session_mismatch")
    return Turn(
        parent=parent,
        appended=tuple(appended),
        answer=answer,
        prompt_ids=record["request"]["input_ids"] if mine else answer.prompt_ids,
        ids=[pair[1] for pair in pairs] if pairs is not None else answer.ids,
        log_probs=[pair[0] for pair in pairs] if pairs is not None else answer.log_probs,
        forced=forced,
        seen=None if differences is None else sum(one["type"] == "assistant_text" for one in differences),
    )


def prefix_faults(bound: BoundFamily, turn: Turn) -> list[str] | None:
    """Whether the prompt begins with the parent's checkpoint, up to `max_trim_tokens`; None of what was not seen."""
    if turn.parent is None or turn.prompt_ids is None or (before := turn.parent.checkpoint) is None:
        return None
    kept = before[: len(before) - bound.family.max_trim_tokens]
    prompt = turn.prompt_ids[: len(kept)]
    difference = first_difference(bound, kept, prompt)
    if difference is None:
        return []
    return [
        f"the prompt does not begin with the checkpoint before it: token {difference.index}, behind "
        f"{difference.before!r}, was {difference.expected!r} and is {difference.actual!r}"
    ]


def record_faults(bound: BoundFamily, view: Json, turn: Turn) -> Iterator[str]:
    """Whether session server, client and engine name the same tokens."""
    answer = turn.answer
    last = view["records"][-1]["response"].get("id")
    if last != answer.id:
        yield f"the session's last record is answer {last}, not {answer.id}"
        return
    prompt, ids = turn.prompt_ids or [], turn.ids or []
    if answer.prompt_ids is not None:
        yield from _unequal(bound, "the engine was given another prompt than was sent", prompt, answer.prompt_ids)
    if answer.prompt_tokens not in (None, len(prompt)):
        yield f"the engine counts {answer.prompt_tokens} prompt tokens, {len(prompt)} were sent"
    if answer.ids is not None:
        yield from _unequal(bound, "record and answer differ in sampled ids", ids, answer.ids)
    if answer.log_probs is not None and answer.log_probs != turn.log_probs:
        yield "record and answer differ in log-probabilities"
    accumulated = view["metadata"].get("accumulated_token_ids") or []
    yield from _unequal(
        bound, "accumulated_token_ids are not the prompt and what was sampled", [*prompt, *ids], accumulated
    )


def text_faults(bound: BoundFamily, turn: Turn) -> list[str] | None:
    """Whether the sampled ids spell the message: all its letters in order, white space aside; None if they cannot."""
    if turn.ids is None or not all(bound.tokenizer.decode([token]) for token in {*turn.ids}):
        return None  # a vocabulary is padded with ids that have no text; engines make up one
    spelled = _squashed(bound.tokenizer.decode(turn.ids))
    message = turn.answer.message
    said = _squashed(str(message.get("reasoning_content") or "")) + _squashed(str(message.get("content") or ""))
    names = [str(call["function"]["name"]) for call in message.get("tool_calls") or ()]
    return [
        f"the sampled ids spell {bound.tokenizer.decode(turn.ids)!r}, the message says {text!r}"
        for text in (said, *names)
        if not _within(text, spelled)
    ]


def hard_faults(view: Json) -> Iterator[str]:
    """What the session's self-check names that is no harmless difference of text."""
    differences = view["metadata"].get("tito_session_mismatch")
    if differences is None:
        yield "the session's metadata has no tito_session_mismatch: its self-check did not run"
        return
    for one in differences:
        if one["type"] != "assistant_text":
            yield (
                f"{one['type']} in segment {one['segment_index']}: {one['detail']}; expected "
                f"{one['expected_text']!r}, found {one['actual_text']!r}"
            )


def sample_faults(bound: BoundFamily, sample: Mapping[str, Any], last: Turn, *, shared_ok: bool) -> list[str] | None:
    """Whether a sample has the tokens, mask and log-probabilities of the path to `last`; None of what was not seen.

    `shared_ok`: turns before the last may be masked as a whole, since another sample trains on them.
    """
    path = completed(last.path)
    whole, first = path[-1].checkpoint, path[0].prompt_ids
    if whole is None or first is None or any(turn.checkpoint is None or turn.log_probs is None for turn in path):
        return None
    found = list(_unequal(bound, "a sample has other tokens than its turns", whole, sample["tokens"].tolist()))
    start = len(whole) - int(sample["response_length"])
    if not found and start != len(first):
        found = [f"the response starts at token {start}, the first prompt has {len(first)}"]
    return found or list(_mask_faults(bound, sample, path, start, shared_ok=shared_ok))


def completed(path: Sequence[Turn]) -> list[Turn]:
    """The turns that a sample is made of: up to the first that did not end by itself."""
    end = next((at for at, turn in enumerate(path) if turn.answer.finish not in COMPLETED), len(path) - 1)
    return list(path[: end + 1])


def _mask_faults(
    bound: BoundFamily, sample: Mapping[str, Any], path: Sequence[Turn], start: int, *, shared_ok: bool
) -> Iterator[str]:
    mask, log_probs = sample["loss_mask"].tolist(), sample["rollout_log_probs"].tolist()
    sampled = [False] * len(mask)
    for number, turn in enumerate(path, 1):
        if turn.prompt_ids is None or turn.ids is None or turn.log_probs is None:
            continue  # not seen
        at, final = len(turn.prompt_ids) - start, turn is path[-1]
        trim = 0 if final else bound.family.max_trim_tokens
        for place in range(at, min(at + len(turn.ids), len(mask))):
            sampled[place] = True
        own = mask[at : at + len(turn.ids)]
        if not any(own) and shared_ok and not final:
            continue
        if not all(own[: len(turn.ids) - trim]):
            yield f"turn {number}: {own.count(0)} of {len(turn.ids)} sampled tokens are not trained on"
        if any(log_probs[at + n] != turn.log_probs[n] for n, on in enumerate(own) if on):
            yield f"turn {number}: the sample has other log-probabilities than the engine gave"
    made_up = sum(
        1 for on, was, value in zip(mask, sampled, log_probs, strict=True) if not was and (on or value != 0.0)
    )
    if made_up:
        yield f"{made_up} tokens that were not sampled are trained on or have a log-probability"


def _unequal(bound: BoundFamily, what: str, expected: Sequence[int], actual: Sequence[int]) -> Iterator[str]:
    difference = first_difference(bound, expected, actual)
    if difference is not None:
        yield (
            f"{what}: token {difference.index}, behind {difference.before!r}: expected {difference.expected!r}, found "
            f"{difference.actual!r}"
        )


def rendering_faults(
    bound: BoundFamily, ours: Sequence[int], ids: Sequence[int] | None, count: int | None
) -> Iterator[str]:
    """Whether what the engine told of its own rendering is ours."""
    if ids is not None:
        yield from _unequal(bound, "the engine renders the first turn otherwise", ours, ids)
    elif count is not None and count != len(ours):
        yield f"the engine renders the first turn with {count} tokens, ours has {len(ours)}"


def known_otherwise(bound: BoundFamily, opening: Json, ids: Sequence[int] | None) -> str | None:
    """Why an engine that renders an opening with `ids` is right all the same; None if it is not.

    SGLang 0.5.23 hands each tool to a Jinja template with a `defer_loading` that nobody sent, beside `function`
    (`Tool` in `sglang/srt/entrypoints/openai/protocol.py`; its `Function` leaves it out). To go when releases that do
    so are no longer supported.
    """
    if ids is None or not opening.get("tools"):
        return None
    tools = [{**tool, "defer_loading": None} for tool in opening["tools"]]
    theirs = bound.encode(bound.render(opening["messages"], tools, opening.get("chat_template_kwargs")))
    return 'it adds "defer_loading": null to each tool, as SGLang 0.5.23 does' if theirs == list(ids) else None


def _squashed(text: str) -> str:
    """Without white space, and without what stands for bytes that are no text."""
    return "".join(text.split()).replace("\ufffd", "")


def _within(text: str, whole: str) -> bool:
    """Whether the letters of `text` stand in `whole` in their order."""
    rest = iter(whole)
    return all(char in rest for char in text)
