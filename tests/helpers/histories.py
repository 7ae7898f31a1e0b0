"""Random agents and engines for histories, and an independent model of the rules they are held against."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from helpers.golden import installed_family, real_tokenizer
from helpers.routing_rows import Numbers, usable
from miles_core.errors import RenderError
from miles_core.session.routing import Replay
from miles_core.session.turn import PreparedTurn
from miles_core.tito import BoundFamily
from miles_core.types import Message, Tool

FAMILIES = {"qwen3": "qwen3", "glm47": "glm-4.7", "kimi25": "kimi25", "minimax_m25": "minimax_m25",
            "nemotron3": "nemotron3", "qwen35": "qwen35", "deepseekv4": "recipe"}  # fmt: skip
"""Families and the revision each is bound with."""

STOPS = {
    "qwen3": ("<|im_end|>",),
    "glm47": ("<|user|>", "<|observation|>"),
    "kimi25": ("<|im_end|>",),
    "minimax_m25": ("[e~[",),
    "nemotron3": ("<|im_end|>",),
    "qwen35": ("<|im_end|>",),
    "deepseekv4": ("<｜end▁of▁sentence｜>",),
}
"""What a model samples at the end of a turn, as its format has it."""

NEVER_APPENDED = {"minimax_m25": {"system"}, "qwen35": {"system"}, "deepseekv4": {"system"}}
"""Roles that a family takes in first prompts only."""

TAKEN_OVER = {"glm47": ("<|user|>", "<|observation|>")}
"""Stop tokens that the next turn writes again."""

ASKS = (*["extend"] * 6, *["tool", "respell", "inject", "retry"] * 2, "branch", "compact", "tools", "cut", "resend",
        "edit", "fresh", "system")  # fmt: skip
REPLIES = ("said", "said", "said", "called", "unstopped", "cut", "full", "other_ids", "random", "other_stop", "empty",
           "abort", "broken")  # fmt: skip

TEXTS = ("Hi.", "Go on.", "", "  naïve 数 🙂\n\n", '{"a": [1, 2]}', "Hi.")


@cache
def bound(name: str) -> BoundFamily:
    """The family on its checkpoints' tokenizer."""
    return installed_family(name).bind(real_tokenizer(name), FAMILIES[name])


@cache
def all_ids(name: str) -> range:
    """Every id that the tokenizer has."""
    return range(real_tokenizer(name).vocab_size)


def function(name: str) -> Tool:
    """A tool of that name."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "description": "It.", "parameters": parameters}}


TOOLS: tuple[list[Tool], ...] = ([function("look")], [function("look"), function("find")])


# -- the model ---------------------------------------------------------------------------------------------------------

EXACT, SPELT, LOOSE = "exact", "spelt", "loose"
"""How near a generation is to the template: its own ids, other ids of its text, anything."""


@dataclass(eq=False)
class Gen:
    """One committed generation as the model knows it; `messages` are all from the start, its own answer last."""

    id: int
    parent: Gen | None
    messages: list[Message]
    prompt: list[int]
    sampled: list[int]
    log_probs: list[float]
    tools: list[Tool] | None
    finish: str
    level: str
    reply: dict[str, Any]
    taken_over: int
    rows: Numbers

    def path(self) -> list[Gen]:
        return [*(self.parent.path() if self.parent else []), self]

    @property
    def checkpoint(self) -> list[int]:
        return [*self.prompt, *self.sampled]


@dataclass(frozen=True)
class Refused:
    """A request that the rules turn down."""

    status: int


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A turn that the engine works on."""

    turn: PreparedTurn
    base: Gen | None
    head: Gen | None
    messages: list[Message]
    tools: list[Tool] | None
    changed: bool


def same(left: Message, right: Message) -> bool:
    """What the strict matcher must say of the messages made here."""

    def meaning(message: Message) -> str:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else " ".join(part["text"] for part in content)
        calls = [{k: v for k, v in call.items() if k != "index"} for call in message.get("tool_calls") or []]
        return json.dumps([message["role"], text, message.get("reasoning_content") or "", calls], sort_keys=True)

    return meaning(left) == meaning(right)


def shared(stored: Sequence[Message], asked: Sequence[Message]) -> int:
    """How many leading messages agree."""
    return sum(1 for _ in itertools.takewhile(lambda pair: same(*pair), zip(stored, asked, strict=False)))


@dataclass
class Model:
    """The rules of histories, in few words and slowly."""

    family: BoundFamily
    tree: bool
    limit: int
    """Linear: generations that may be discarded; tree: nodes."""
    refuse_tools: bool
    replay: Replay
    gens: list[Gen] = field(default_factory=list)
    """Linear: the line; tree: every generation in order of commit."""
    committed: int = 0
    marks: set[int | None] = field(default_factory=set)
    tools_changed: bool = False

    @property
    def head(self) -> Gen | None:
        return self.gens[-1] if self.gens else None

    def place(self, asked: Sequence[Message], tools: list[Tool] | None) -> Gen | Refused | None:
        if self.tree and len(self.gens) >= self.limit:
            return Refused(400)
        if self.tree:
            fit = [g for g in self.gens if shared(g.messages, asked) == len(g.messages)]
            fit = [g for g in fit if tools is None or g.tools == tools]
            base = max(fit, key=lambda g: (len(g.messages), g.id), default=None)
            if base is not None and base.finish == "length":
                return Refused(409)
        else:
            match = shared(self.gens[-1].messages, asked) if self.gens else 0
            kept = [g for g in self.gens if len(g.messages) <= match]
            if len(self.gens) - len(kept) > self.limit:
                return Refused(400)
            base = kept[-1] if kept else None
            if base is not None and tools not in (None, base.tools) and self.refuse_tools:
                return Refused(400)
        return base if self._can_be_written(base, asked, tools) else Refused(400)

    def _can_be_written(self, base: Gen | None, asked: Sequence[Message], tools: list[Tool] | None) -> bool:
        known = len(base.messages) if base else 0
        new = {message["role"] for message in asked[known:]}
        if base is not None and new & NEVER_APPENDED.get(self.family.name, set()):
            return False
        try:
            self.whole(base, asked[known:], tools)
        except RenderError:
            return False
        return True

    def whole(self, base: Gen | None, appended: Sequence[Message], tools: list[Tool] | None) -> str:
        """The prompt as the family writes the whole conversation."""
        known = base.messages if base else []
        return self.family.render([*known, *appended], base.tools if base else tools, {}, True)

    def accepts(self, pending: Pending) -> bool:
        return len(self.gens) < self.limit if self.tree else self.head is pending.head

    def commit(self, gen: Gen, pending: Pending) -> None:
        if not self.tree:
            self.gens = gen.parent.path() if gen.parent else []
        self.gens.append(gen)
        self.committed += 1
        self.marks.discard(gen.parent.id if gen.parent else None)
        self.tools_changed |= pending.changed

    # -- samples ---------------------------------------------------------------------------------------------------

    def leaves(self) -> list[Gen]:
        parents = {id(g.parent) for g in self.gens}
        return [g for g in self.gens if id(g) not in parents]

    def superseded(self, leaf: Gen) -> bool:
        return leaf.parent is not None and any(g.parent is leaf.parent and g.id > leaf.id for g in self.gens)


@dataclass
class Expected:
    """A sample as the rules have it, and whose each trained token is (generation and position in it)."""

    tokens: list[int]
    owners: list[tuple[int, int] | None]
    log_probs: list[float]
    used: list[Gen]
    statuses: set[str]


def expected_sample(path: Sequence[Gen], limit: int | None, marks: set[int | None], replay: Replay) -> Expected | None:
    """Lay a path out by the whole prompts that were sent, as far as there are routing rows. Raises Gap."""
    whole = laid_out(path, limit, marks, len(path))
    turns = usable([gen.rows for gen in whole.used], replay) if whole else 0
    return whole if whole is None or turns == len(whole.used) else laid_out(path, limit, marks, turns)


def laid_out(path: Sequence[Gen], limit: int | None, marks: set[int | None], turns: int) -> Expected | None:
    """The first turns of a path, by the whole prompts that were sent, not by what was new in them."""
    tokens: list[int] = []
    owners: list[tuple[int, int] | None] = []
    values: list[float] = []
    used: list[Gen] = []
    cut = inside = False
    for gen, following in itertools.islice(itertools.zip_longest(path, path[1:]), turns):
        left = gen.sampled[: len(gen.sampled) - (gen.taken_over if following is not None else 0)]
        if limit is not None and len(gen.prompt) + len(left) > limit:
            left = left[: max(limit - len(gen.prompt), 0)]
            cut, inside = True, bool(left)
            if not inside:
                break
        gap = len(gen.prompt) - len(owners)
        owners += [*[None] * gap, *((gen.id, at) for at in range(len(left)))]
        values += [*[0.0] * gap, *gen.log_probs[: len(left)]]
        tokens = [*gen.prompt, *left]
        used.append(gen)
        if cut or gen.finish == "length":
            break
    if not used:
        return None
    if used[-1].finish == "length" or inside:
        statuses = {"truncated"}
    elif used[-1] is path[-1]:
        statuses = {"aborted" if used[-1].id in marks else "completed"}
    else:  # whether a place that later turns were cut off from counts as the sample's end is left open
        statuses = {"completed", "aborted"} if used[-1].id in marks else {"completed"}
    start = len(used[0].prompt)
    return Expected(tokens, owners[start:], values[start:], used, statuses)


# -- the engine ----------------------------------------------------------------------------------------------------


class Engine:
    """Makes up answers. No two of its log-probabilities are equal."""

    def __init__(self, family: BoundFamily) -> None:
        self.family = family
        self.numbers = itertools.count(1)
        self.values = itertools.count(1)

    def answer(self, kind: str, twin: Message | None, draw: random.Random) -> tuple[dict[str, Any], list[int], str]:
        """The reply, the ids sampled, and how near they are to the template; `twin` is said once more."""
        number = next(self.numbers)
        content = draw.choice((*["Fine."] * 5, "Good, then.", "naïve 数"))
        message: Message = {
            "role": "assistant",
            "content": content,
            "reasoning_content": draw.choice((*["Well."] * 5, "Hm")),
        }
        if kind == "said" and twin is not None:
            message = copy.deepcopy(twin)
        if kind == "called":
            function = {"name": "look", "arguments": draw.choice(("{}", '{"a": 1}'))}
            message["tool_calls"] = [
                {"id": f"functions.look:{number}", "type": "function", "index": 0, "function": function}
            ]
        ids, level = self._sampled(kind, message, draw)
        finish = {"cut": "length", "full": "length", "abort": "abort"}.get(kind, "stop")
        if kind in ("cut", "random", "empty"):
            message = {"role": "assistant", "content": self.family.tokenizer.decode(ids)}
        return self._reply(number, message, ids, finish, draw), ids, level

    def _sampled(self, kind: str, message: Message, draw: random.Random) -> tuple[list[int], str]:
        tokenizer, name = self.family.tokenizer, self.family.name
        said = self._written(message)
        ids = tokenizer.encode(said)
        stop = tokenizer.token_to_id(draw.choice(STOPS[name]))
        assert stop is not None
        if kind in ("unstopped", "full"):
            return ids, EXACT
        if kind == "cut":
            return ids[: draw.randrange(1, len(ids))], LOOSE
        if kind == "random":
            loose = draw.choices(all_ids(name), k=draw.randrange(1, 9))
            return [*loose, *([stop] if draw.random() < 0.5 else [])], LOOSE
        if kind == "other_stop":
            return [*ids, self.family.stop_ids[-1]], EXACT if len(self.family.stop_ids) == 1 else LOOSE
        if kind == "empty":
            return [], LOOSE
        if kind == "other_ids":
            before, content, behind = said.rpartition(message["content"])
            parts = (before, *content, behind)
            return [*(i for part in parts for i in tokenizer.encode(part)), stop], SPELT
        return [*ids, stop], EXACT

    def _written(self, message: Message) -> str:
        """What the model writes for a message, up to the end of the turn."""
        asked = [{"role": "user", "content": "?"}]
        whole = self.family.render([*asked, message], None, {}, False)
        prompt = self.family.render(asked, None, {}, True)
        assert whole.startswith(prompt)
        end = self.family.family.turn_end or ""
        assert whole.endswith(end)
        return whole[len(prompt) : len(whole) - len(end)]

    def _reply(self, number: int, message: Message, ids: list[int], finish: str, draw: random.Random) -> dict[str, Any]:
        meta = {
            "id": f"r{number}",
            "finish_reason": {"type": finish},
            "prompt_tokens": number,
            "completion_tokens": len(ids),
            "cached_tokens": draw.randrange(5),
            "weight_version": f"w{number}",
            "output_token_logprobs": [[-next(self.values) / 4096, token, None] for token in ids],
        }
        choice = {"index": 0, "message": message, "finish_reason": finish, "meta_info": meta}
        return {"id": f"chat-{number}", "object": "chat.completion", "choices": [choice]}


# -- the agent -----------------------------------------------------------------------------------------------------


def user(draw: random.Random, family: BoundFamily) -> Message:
    """A user's message, now and then with a control token spelled out."""
    text = draw.choice(TEXTS)
    if draw.random() < 0.05:
        text += draw.choice(sorted(family.tokenizer.added_tokens))
    return {"role": "user", "content": [{"type": "text", "text": text}] if draw.random() < 0.1 else text}


def respelt(message: Message, draw: random.Random) -> Message:
    """The same message in another spelling."""
    out = copy.deepcopy(message)
    if isinstance(out.get("content"), str) and out["content"] and draw.random() < 0.5:
        out["content"] = [{"type": "text", "text": out["content"]}]
    elif not out.get("content"):
        out["content"] = draw.choice((None, "", []))
    if not out.get("reasoning_content"):
        out["reasoning_content"] = draw.choice((None, ""))
    if not out.get("tool_calls"):
        out["tool_calls"] = draw.choice((None, []))
    out["unknown"] = draw.random()
    for call in out.get("tool_calls") or []:
        call.pop("index", None)
    return dict(sorted(out.items(), key=lambda item: draw.random()))


def ask(how: str, seen: list[list[Message]], draw: random.Random, family: BoundFamily) -> list[Message]:
    """What an agent sends next, made from a conversation it has had."""
    at = -1 if draw.random() < 0.8 else draw.randrange(len(seen))
    known = copy.deepcopy(seen[at])
    own = {"role": "assistant", "content": draw.choice(("Mine.", "Fine.")), "reasoning_content": "Well."}
    if how == "tool" and known:
        calls = known[-1].get("tool_calls") or [{"id": "functions.look:0"}]
        return [*known, *({"role": "tool", "tool_call_id": c["id"], "content": draw.choice(TEXTS)} for c in calls)]
    if how == "retry":  # the messages before the last answer, as they were
        return known[:-1] or [user(draw, family)]
    if how == "branch":  # as far as some answer, then on differently
        ends = [i + 1 for i, message in enumerate(known) if message["role"] == "assistant"]
        return [*known[: draw.choice(ends or [0])], user(draw, family)]
    if how == "compact":
        tail = known[len(known) - draw.randrange(3) :] if len(known) > 3 else []
        return [{"role": "user", "content": "So far: much."}, *([own] if draw.random() < 0.5 else []), *tail,
                user(draw, family)]  # fmt: skip
    if how == "inject":
        return [*known, user(draw, family), own, *([user(draw, family)] if draw.random() < 0.7 else [])]
    if how == "cut" and known:
        return known[: draw.randrange(1, len(known) + 1)]
    if how == "resend" and known:
        return known
    if how == "respell" and known:
        return [*(respelt(message, draw) for message in known), user(draw, family)]
    if how == "edit" and known:
        known[draw.randrange(len(known))]["content"] = draw.choice(TEXTS)
        return known
    if how == "fresh":
        return [{"role": "system", "content": "Be brief."}, user(draw, family)]
    if how == "system":
        return [*known, {"role": "system", "content": "Now."}, user(draw, family)]
    return [*known, user(draw, family)]
