"""One session being driven: asks for turns, looks at the session after each, and has every check made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any

from miles_core.testing.verify_session import checks
from miles_core.testing.verify_session.checks import COMPLETED, Turn
from miles_core.testing.verify_session.client import Answer, Refusal, SessionClient
from miles_core.testing.verify_session.forcing import CALCULATOR, Forcing
from miles_core.testing.verify_session.results import Check, Ledger, Place
from miles_core.tito import BoundFamily
from miles_core.types import Json, Message

TRIES = 4
"""How often a turn is asked for until it ends as it is wanted to; the last half of them is not forced."""

TEMPERATURES = (0.7, 1.0, 1.3)
"""Of turns, by the number of the cycle."""

FORCED_TOKENS = 512
"""A forced turn ends by itself when its regex does, at the latest with a token for every letter."""

CUT_AT = 4
"""Tokens of a turn that shall end for `length`."""


class Want(StrEnum):
    """How a turn shall end."""

    ANY = "an answer"
    END = "an answer that ends by itself"
    CALL = "a tool call"
    CALLS = "parallel tool calls"
    CUT = "an answer that is cut off"


class Missed(Exception):
    """The model did not do what a conversation needs; it cannot go on."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What all conversations of a verification share."""

    bound: BoundFamily
    ledger: Ledger
    forcing: Forcing | None
    """None if nothing can be forced."""
    max_tokens: int
    seeds: count[int]
    openings: list[tuple[Place, Json, list[int]]] = field(default_factory=list)
    """Requests of first turns, as the engine got them, and our ids."""


class Talk:
    """Drives one session. `quiet` sessions think not, so that their turns can be forced."""

    def __init__(self, run: Run, client: SessionClient, place: Place, *, quiet: bool = True) -> None:
        self.run, self._client, self.place = run, client, place
        self._forcing = run.forcing if quiet else None
        self._session = ""
        self._last: dict[str, Turn] = {}

    async def __aenter__(self) -> Talk:
        self._session = await self._client.create(self._forcing.kwargs if self._forcing is not None else {})
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.delete(self._session)

    @property
    def forced(self) -> bool:
        """Whether turns of this session are forced."""
        return self._forcing is not None

    async def ask(
        self,
        parent: Turn | None,
        *appended: Message,
        want: Want = Want.END,
        stream: bool = False,
        alone: bool = True,
        event: str | None = None,
    ) -> Turn:
        """A turn that extends `parent`, asked for again until it ends as wanted. Raises Missed, or Refusal.

        `alone`: no other turn of the session is under way, so that its last record is this turn's. `event` is what
        happened, once it did.
        """
        unread = False
        for attempt in range(TRIES):
            turn = await self._once(parent, appended, want, stream, alone, force=attempt < TRIES // 2)
            may_stray = want in (Want.ANY, Want.CUT)
            if _as_wanted(turn, want) and (may_stray or not checks.strays(self.run.bound, turn)):
                self._note(turn, event)
                return turn
            unread = unread or checks.call_not_read(self.run.bound, turn, [CALCULATOR])
        ended = turn.answer.finish
        why = f"no turn of {TRIES} was {want}; the last ended with {ended}"
        if want in (Want.CALL, Want.CALLS) and unread:
            why += "; what was sampled is a call to the family's parser: is the engine's tool-call parser the family's?"
        roles = () if parent is None else (appended_event(message["role"]) for message in appended)
        for name in (event, *_wanted_event(want), *roles):
            if name is not None:
                self.run.ledger.did_not_happen(self.place, name, why)
        raise Missed(why)

    async def _once(
        self, parent: Turn | None, appended: Sequence[Message], want: Want, stream: bool, alone: bool, *, force: bool
    ) -> Turn:
        regex = _regex(self._forcing, want) if self._forcing is not None and force else None
        body = self._body(parent, appended, want, regex, stream)
        answer = await self._client.chat(self._session, body)
        self.run.ledger.turns += 1
        self.run.ledger.judge(Check.ANSWERED, self.place, ())
        if answer.stream is not None:
            self.run.ledger.streams[answer.stream] += 1
        if alone:
            turn = await self._looked_at(parent, appended, answer, regex is not None)
        else:
            turn = Turn(
                parent=parent, appended=tuple(appended), answer=answer, prompt_ids=answer.prompt_ids, ids=answer.ids,
                log_probs=answer.log_probs, forced=regex is not None,
            )  # fmt: skip
        self._judge(turn)
        self._last[str(answer.id)] = turn
        return turn

    def _body(
        self, parent: Turn | None, appended: Sequence[Message], want: Want, regex: str | None, stream: bool
    ) -> Json:
        limit = CUT_AT if want is Want.CUT else self.run.max_tokens
        body: Json = {
            "model": "default",
            "messages": [*(parent.conversation if parent is not None else []), *appended],
            "tools": [CALCULATOR],
            "max_tokens": limit if regex is None else max(limit, FORCED_TOKENS),
            "temperature": TEMPERATURES[self.place.cycle % len(TEMPERATURES)],
            "seed": next(self.run.seeds),
        }
        if regex is not None:
            body["regex"] = regex
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        else:
            body["return_prompt_token_ids"] = True  # an engine refuses it of a stream
        return body

    async def _looked_at(self, parent: Turn | None, appended: Sequence[Message], answer: Answer, forced: bool) -> Turn:
        """The turn as the session has it, with the checks of what the session shows."""
        view = await self._client.show(self._session, "last")
        turn = checks.recorded_turn(view, parent, appended, answer, forced)
        ledger, bound = self.run.ledger, self.run.bound
        ledger.judge(Check.RECORDS, self.place, checks.record_faults(bound, view, turn))
        hard = list(checks.hard_faults(view))
        if hard and any(checks.strays(bound, one) for one in turn.path):
            ledger.strayed += 1
        else:
            ledger.judge(Check.SELF_CHECK, self.place, hard)
        if parent is None and turn.prompt_ids is not None:
            request = view["records"][-1]["request"]
            self.run.openings.append((self.place, opening_of(request, bound), turn.prompt_ids))
        return turn

    def _judge(self, turn: Turn) -> None:
        ledger, bound = self.run.ledger, self.run.bound
        ledger.judge(Check.TEXT, self.place, checks.text_faults(bound, turn))
        if turn.parent is not None:
            ledger.judge(Check.PREFIX, self.place, checks.prefix_faults(bound, turn))
        before = 0 if turn.parent is None else turn.parent.seen
        differs = checks.strays(bound, turn) or (turn.seen or 0) > (before or 0)
        if turn.forced or turn.answer.finish not in COMPLETED:
            ledger.left_out += 1
            ledger.left_out_differing += differs
        elif turn.seen is not None and before is not None:
            ledger.counted += 1
            ledger.differing += differs

    def _note(self, turn: Turn, event: str | None) -> None:
        """Count what happened."""
        ledger = self.run.ledger
        if turn.parent is not None:
            for message in turn.appended:
                ledger.happened(self.place, appended_event(message["role"]))
        calls = len(turn.answer.message.get("tool_calls") or ())
        happened = {
            CALLED: calls > 0,
            CALLED_TWICE: calls > 1,
            CUT: turn.answer.finish == "length",
            STREAMED: turn.answer.stream is not None,
        }
        for name in (event, *(name for name, did in happened.items() if did)):
            if name is not None:
                ledger.happened(self.place, name)

    async def refused(self, parent: Turn, *messages: Message, status: int, event: str) -> None:
        """A turn that has to be refused."""
        body = self._body(parent, messages, Want.ANY, None, False)
        try:
            await self._client.chat(self._session, body)
        except Refusal as refusal:
            faults = [] if refusal.status == status else [f"expected {status}: {refusal}"]
        else:
            faults = [f"{event}: expected {status}, the turn was answered"]
        self.run.ledger.judge(Check.ANSWERED, self.place, faults)
        if not faults:
            self.run.ledger.happened(self.place, event)

    async def close(self, last: Turn) -> None:
        """Fetch the samples of a session that ended with `last` and check them."""
        reply = await self._client.samples(self._session)
        tree = self.place.history == "tree"
        ledger = self.run.ledger
        if not reply.samples:
            ledger.judge(Check.SAMPLES, self.place, [f"the session gives no sample: {reply.empty_reason}"])
        for sample in reply.samples:
            leaf = sample["metadata"].get("leaf") or {}
            turn = self._last.get(str(leaf.get("response_id"))) if tree else last
            if turn is None:
                ledger.judge(
                    Check.SAMPLES, self.place, [f"a sample ends at answer {leaf.get('response_id')}, not ours"]
                )
                continue
            faults = checks.sample_faults(self.run.bound, sample, turn, shared_ok=tree)
            ledger.judge(Check.SAMPLES, self.place, faults)
            ledger.happened(self.place, SAMPLES)


CALLED, CALLED_TWICE, CUT, STREAMED, SAMPLES = "tool call", "parallel calls", "cut off", "streamed", "samples"


def appended_event(role: str) -> str:
    """The event that a message of this role was appended to a generation."""
    return f"append {role}"


def opening_of(request: Mapping[str, Any], bound: BoundFamily) -> Json:
    """A first turn's request as the engine got it, but for the ids: it has to render the messages itself."""
    kept = ("model", "messages", "tools", "reasoning_effort", "lora_path")
    opening = {key: request[key] for key in kept if request.get(key) is not None}
    kwargs = bound.effective_kwargs(request.get("chat_template_kwargs"))
    return {**opening, **({"chat_template_kwargs": kwargs} if kwargs else {})}


def results_of(turn: Turn, results: Sequence[str] = ("42", "7")) -> list[Message]:
    """Tool messages that answer the turn's calls; none if it made none."""
    calls = turn.answer.message.get("tool_calls") or ()
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": results[at % len(results)],
        }
        for at, call in enumerate(calls)
    ]


def _regex(forcing: Forcing, want: Want) -> str | None:
    if want is Want.CUT:
        return None
    return {Want.CALL: forcing.call, Want.CALLS: forcing.calls}.get(want, forcing.text)


def _as_wanted(turn: Turn, want: Want) -> bool:
    calls = len(turn.answer.message.get("tool_calls") or ())
    ended = turn.answer.finish in COMPLETED
    wanted = {
        Want.ANY: True,
        Want.END: ended,
        Want.CALL: ended and calls >= 1,
        Want.CALLS: ended and calls >= 2,
        Want.CUT: turn.answer.finish == "length",
    }
    return wanted[want]


def _wanted_event(want: Want) -> tuple[str, ...]:
    return {Want.CALL: (CALLED,), Want.CALLS: (CALLED, CALLED_TWICE), Want.CUT: (CUT,)}.get(want, ())
