"""One trajectory through a family, as a session would take it: the four checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from miles_core.errors import InvariantError, RenderError
from miles_core.testing.verify.results import CHECKS, Finding, Outcome, Tried, first_difference
from miles_core.testing.verify.sampling import Said, other_endings, said, sampled_ids, says_nothing
from miles_core.testing.verify.trajectories import Trajectory
from miles_core.tito import BoundFamily, compare_tokens, parse_difference
from miles_core.types import Message

APPEND_ONLY, JOINED, SELF_CHECK, PARSED = CHECKS
_OTHER = "·other·"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of thinking: `on`, `off` or `none`, the template kwargs of it, whether generations carry reasoning."""

    name: str
    kwargs: Mapping[str, Any]
    reasons: bool


def try_trajectory(bound: BoundFamily, trajectory: Trajectory, way: Way, formats: frozenset[str]) -> Tried:
    """Take a trajectory through the family. `formats` is what the format has of `reasoning` and `calls`."""
    why = _does_not_apply(bound, trajectory, way, formats)
    if why is not None:
        return Tried(trajectory=trajectory.name, thinking=way.name, skipped=why)
    session = _Session(bound, trajectory, way)
    try:
        session.run()
    except RenderError as error:
        if bound.family.best_effort and not session.failed:  # refusing a conversation is not rewriting it
            why = f"refused: {error.message}"
            return Tried(trajectory=trajectory.name, thinking=way.name, skipped=why)
        session.found(APPEND_ONLY, Finding(Outcome.FAIL, error.message, session.turn))
    except InvariantError as error:
        # the suffix alone; of a template without a family the whole conversation alone says whether it appends
        check = JOINED if bound.family.best_effort else APPEND_ONLY
        session.found(check, Finding(Outcome.FAIL, error.message, session.turn))
    except Exception as error:  # a family's own code may raise anything
        session.found(JOINED, Finding(Outcome.FAIL, f"{type(error).__name__}: {error}", session.turn))
    return Tried(trajectory=trajectory.name, thinking=way.name, findings=session.findings())


def _does_not_apply(bound: BoundFamily, trajectory: Trajectory, way: Way, formats: frozenset[str]) -> str | None:
    roles = {message["role"] for message in trajectory.messages[trajectory.generations[0] + 1 :]}
    roles -= set() if _has_written(trajectory) else {"assistant"}
    refused = sorted(roles - set(bound.family.allowed_append_roles))
    if refused:
        return f"not allowed: {', '.join(refused)} cannot be appended"
    missing = sorted(trajectory.needs - formats)
    if missing:
        return f"the format has no {' and no '.join(missing)}"
    if "reasoning" in trajectory.needs and not way.reasons:
        return "thinking is off"
    return None


def _has_written(trajectory: Trajectory) -> bool:
    return any(at > trajectory.generations[0] for at in trajectory.written)


class _Session:
    """The tokens of a session, turn by turn, beside what the template writes for the whole conversation."""

    def __init__(self, bound: BoundFamily, trajectory: Trajectory, way: Way) -> None:
        self.bound = bound
        self.trajectory = trajectory
        self.kwargs = bound.merge_kwargs(way.kwargs)
        sampled = trajectory.generations
        self.messages: list[Message] = [
            message if way.reasons or at not in sampled else _unthought(message)
            for at, message in enumerate(trajectory.messages)
        ]
        self.tools = list(trajectory.tools) or None
        self.later_tools = list(trajectory.tools_later) or self.tools
        self.turn = 1
        self._expected = ""  # the text of the session's tokens, put together from what is rendered
        self._exact = True  # whether its tokens are those of that text
        self._left_out = False  # whether history leaves out a whole turn
        self._rendered: dict[tuple[int, bool], str] = {}
        self._made = set[str]()  # checks that were made to the end
        self._findings: dict[str, Finding] = {}

    def found(self, check: str, finding: Finding) -> None:
        """Note a finding; the first failure of a check stays, before the first other one."""
        known = self._findings.get(check)
        if known is None or (known.outcome is not Outcome.FAIL and finding.outcome is Outcome.FAIL):
            self._findings[check] = finding

    @property
    def failed(self) -> bool:
        """Whether a check has failed so far."""
        return any(finding.outcome is Outcome.FAIL for finding in self._findings.values())

    def findings(self) -> dict[str, Finding]:
        """Every check's finding, in order; those that a failure kept from being made to the end are skipped."""
        unmade, passed = Finding(Outcome.SKIP, "not reached"), Finding(Outcome.PASS)
        return {check: self._findings.get(check, passed if check in self._made else unmade) for check in CHECKS}

    def run(self) -> None:
        """Whether the template appends, then all turns, then the self-check."""
        positions = self.trajectory.generations
        self._listens(positions[0])
        for self.turn, (at, end) in enumerate(pairwise(positions), 1):
            self._appends(at, end)
        self._made = {APPEND_ONLY}
        self._expected = self._render(positions[0], prompt=True)
        ids = self.bound.encode(self._expected)
        for self.turn, at in enumerate(positions, 1):
            turn = self._said(at)
            if turn is None or not self._may_say(turn, self.messages[at]):
                self._cannot_say(at)
                return
            sampled = self._sample(turn)
            self._parse(at, sampled)
            checkpoint = [*ids, *sampled]
            if self.turn == len(positions):
                self._self_check(at, checkpoint)
                self._made = set(CHECKS)
                return
            ids = self._append(turn, checkpoint, sampled, at, positions[self.turn])

    def _render(self, end: int, *, prompt: bool) -> str:
        text = self._rendered.get((end, prompt))
        if text is None:
            text = self.bound.render(self.messages[:end], self.tools, self.kwargs, prompt)
            self._rendered[end, prompt] = text
        return text

    # -- what the model samples --------------------------------------------------------------------------------

    def _said(self, at: int) -> Said | None:
        def marked(reasoning: str) -> str:
            thought = {**self.messages[at], "reasoning_content": reasoning}
            return self.bound.render([*self.messages[:at], thought], self.tools, self.kwargs, False)

        prompt, history = self._render(at, prompt=True), self._render(at + 1, prompt=False)
        return said(self.bound, prompt, history, self.messages[at], marked)

    def _may_say(self, turn: Said, message: Message) -> bool:
        """Whether history may write the turn otherwise than it was sampled, as the family declares."""
        if not turn.otherwise:
            return True
        kinds = {"no_reasoning", "empty"} if says_nothing(message) else {"no_reasoning"}
        declared = kinds & self.bound.family.sampled_otherwise
        if not declared:
            return False
        self._exact = False
        self._left_out = self._left_out or "empty" in declared
        self.found(JOINED, Finding(Outcome.DIFFERS, "history writes this turn otherwise than it is sampled", self.turn))
        return True

    def _cannot_say(self, at: int) -> None:
        """The template writes a turn in a way that does not begin with the prompt it was sampled behind."""
        prompt, whole = self._render(at, prompt=True), self._render(at + 1, prompt=False)
        reason = "history writes this turn otherwise than the generation prompt lets it be sampled"
        difference = first_difference(self.bound, self.bound.encode(prompt), self.bound.encode(whole))
        self.found(JOINED, Finding(Outcome.FAIL, reason, self.turn, difference))

    def _sample(self, turn: Said) -> list[int]:
        """The ids that a model samples to say a turn, as tokenizing the whole text gives them where that can be."""
        before = self.bound.encode(self._expected)
        whole = self.bound.encode(self._expected + turn.text)
        if whole[: len(before)] == before:
            return sampled_ids(self.bound, whole[len(before) :])
        if self._exact:
            reason = "the prompt's last token and the first sampled one are one token in the whole text"
            self.found(JOINED, Finding(Outcome.DIFFERS, reason, self.turn))
        self._exact = False
        return sampled_ids(self.bound, self.bound.encode(turn.text))

    # -- the checks --------------------------------------------------------------------------------------------

    def _listens(self, end: int) -> None:
        """What a user says makes a difference: a template that writes nothing would pass all other checks."""
        other = [
            {**message, "content": f"{message['content']} {_OTHER}"} if message["role"] == "user" else message
            for message in self.messages[:end]
        ]
        if self.bound.render(other, self.tools, self.kwargs, True) == self._render(end, prompt=True):
            self.found(APPEND_ONLY, Finding(Outcome.FAIL, "what the user says is not written", self.turn))

    def _appends(self, at: int, end: int) -> None:
        """What comes after a generation leaves the text up to it as it was."""
        history, whole = self._render(at + 1, prompt=False), self._render(end, prompt=True)
        if whole.startswith(history):
            return
        roles = ", ".join(message["role"] for message in self.messages[at + 1 : end])
        reason = f"appending {roles} rewrites what stands before"
        difference = first_difference(self.bound, self.bound.encode(history), self.bound.encode(whole))
        self.found(APPEND_ONLY, Finding(Outcome.FAIL, reason, self.turn, difference))

    def _parse(self, at: int, sampled: Sequence[int]) -> None:
        message = self.messages[at]
        needs = {"reasoning": message.get("reasoning_content"), "calls": message.get("tool_calls")}
        unread = [what for what, value in needs.items() if value and what not in self.bound.reads]
        if unread or not self.bound.reads:
            reason = f"the family does not read {' and '.join(unread) or 'anything but text'}"
            self.found(PARSED, Finding(Outcome.SKIP, reason, self.turn))
            return
        tools = self.tools if self.turn == 1 else self.later_tools
        parsed = self.bound.parse(sampled, tools, self.kwargs)
        difference = parse_difference(self.bound.family, message, parsed)
        if difference is not None:
            text = self.bound.tokenizer.decode(sampled)
            self.found(PARSED, Finding(Outcome.FAIL, f"{difference}; sampled was {text!r}", self.turn))

    def _append(self, turn: Said, checkpoint: list[int], sampled: list[int], at: int, end: int) -> list[int]:
        """The next turn's prompt as a session joins it, compared with the whole conversation's."""
        whole = self._render(end, prompt=True)
        appends = whole.startswith(turn.history)
        self._expected = self._expected + turn.text + whole[len(turn.history) :] if appends else whole
        appended = self.messages[at + 1 : end]
        suffix = self.bound.encode(self.bound.render_suffix(self.messages[at], appended, self.later_tools, self.kwargs))
        joined = self._join(checkpoint, suffix)
        self._compare(joined, "")
        for how, ending in other_endings(self.bound, sampled):
            other = self._join([*checkpoint[: len(checkpoint) - len(sampled)], *ending], suffix)
            if other != joined:
                self._compare(other, f" ({how})")
        return joined

    def _join(self, checkpoint: list[int], suffix: list[int]) -> list[int]:
        kept, bridge = self.bound.join(checkpoint, suffix)
        trimmed, most = len(checkpoint) - kept, self.bound.family.max_trim_tokens
        if not 0 <= trimmed <= most:
            reason = f"join keeps {kept} of {len(checkpoint)} tokens, max_trim_tokens is {most}"
            self.found(JOINED, Finding(Outcome.FAIL, reason, self.turn))
        return [*checkpoint[:kept], *bridge, *suffix]

    def _compare(self, joined: list[int], how: str) -> None:
        """Joined against whole: the ids, or where they need not be equal, the text they spell."""
        whole = self.bound.encode(self._expected)
        decode = self.bound.tokenizer.decode
        if joined == whole or (not self._exact and decode(joined) == decode(whole)):
            return
        reason = f"the joined prompt{how} is not what the template writes for the whole conversation"
        difference = first_difference(self.bound, whole, joined)
        self.found(JOINED, Finding(Outcome.FAIL, reason, self.turn + 1, difference))

    def _self_check(self, at: int, checkpoint: list[int]) -> None:
        """What a session would say of itself in `tito_session_mismatch`."""
        rendered = self.bound.encode(self._render(at + 1, prompt=False))
        differences = compare_tokens(self.bound, rendered, checkpoint)
        if not differences:
            return
        harmful = [d for d in differences if d["type"] != "assistant_text" and d["expected_text"] != d["actual_text"]]
        first = (harmful or differences)[0]
        reason = f"{first['type']}: {first['detail']}: {first['actual_text']!r}, expected {first['expected_text']!r}"
        outcome = Outcome.FAIL if (harmful and not self._left_out) or self._exact else Outcome.DIFFERS
        self.found(SELF_CHECK, Finding(outcome, reason, self.turn))


def _unthought(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}
