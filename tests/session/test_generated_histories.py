"""Random agents against a model of the rules: what a session holds and gives is compared after every step.

An agent extends, retries, branches, compacts, injects, respells, cuts back and changes tools, with turns under way
that end in any order; the engine's answers are made up of ids whose log-probabilities are all different, so that
each one tells which generation, and which place in it, it came from.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.histories import (
    ASKS,
    EXACT,
    FAMILIES,
    LOOSE,
    REPLIES,
    TAKEN_OVER,
    TOOLS,
    Engine,
    Expected,
    Gen,
    Model,
    Pending,
    Refused,
    ask,
    bound,
    expected_sample,
)
from helpers.routing_rows import REPLAYS, Gap, RowEngine, check_rows, without_gap
from helpers.same_path import assert_same_samples
from miles_core.errors import EngineReplyError, MilesError, SampleError
from miles_core.session.assemble import AssembledSample, assemble_path
from miles_core.session.commit import commit_turn
from miles_core.session.leaves import SampleHook, leaf_samples, tree_metadata
from miles_core.session.policy import LinearPolicy, TreePolicy
from miles_core.session.reply import read_reply
from miles_core.session.routing import Replay
from miles_core.session.store import SelfCheck, records, session_metadata
from miles_core.session.turn import PreparedTurn, Session, TurnRules, prepare_turn
from miles_core.types import Message, Tool
from miles_matchers.strict import message_key, message_matches
from miles_sample_hooks.drop_retries import pick_samples
from miles_sample_hooks.shared_prefix_mask import postprocess_samples

# -- the driver ----------------------------------------------------------------------------------------------------


class World:
    """A session and the model of it, side by side."""

    def __init__(
        self, name: str, *, tree: bool, limit: int, replay: Replay, refuse_tools: bool = False, keyed: bool = False
    ) -> None:
        self.family = bound(name)
        self.model = Model(self.family, tree, limit, refuse_tools, replay)
        self.rules = TurnRules(
            family=self.family,
            matches=message_matches,
            policy=TreePolicy(limit, message_key if keyed else None) if tree else LinearPolicy(limit),
            on_tools_change="refuse" if refuse_tools else "keep",
            replay=replay,
        )
        self.rows = RowEngine(replay)
        self.session = Session("s", chat_template_kwargs={}, metadata={"mine": 1})
        self.engine = Engine(self.family)
        self.check = SelfCheck(self.family)
        self.pending: list[Pending] = []
        self.seen: list[list[Message]] = [[]]
        self.tools: list[Tool] | None = None
        self.clock = itertools.count(1000)

    # -- steps -----------------------------------------------------------------------------------------------------

    def ask(self, how: str, draw: random.Random) -> None:
        messages = ask(how, self.seen, draw, self.family)
        if how == "tools":
            self.tools = draw.choice((None, *TOOLS))
        sent = draw.choice((None, [], self.tools)) if draw.random() < 0.2 else self.tools
        body: dict[str, Any] = {"model": "m", "messages": messages, "temperature": 0.5, "top_k": 7}
        if sent is not None or draw.random() < 0.5:
            body["tools"] = copy.deepcopy(sent)
        tools = sent or None
        base = self.model.place(messages, tools)
        untouched, before = copy.deepcopy(body), self.snapshot()
        if isinstance(base, Refused):
            with pytest.raises(MilesError) as refusal:
                prepare_turn(self.session, body, self.rules, rid="rid")
            assert refusal.value.status == base.status, refusal.value.message
            assert self.snapshot() == before
            return
        turn = prepare_turn(self.session, body, self.rules, rid="rid")
        assert body == untouched
        assert self.snapshot() == before
        self.check_prompt(turn, base, messages, tools)
        known = base.messages if base else []
        self.pending.append(
            Pending(
                turn=turn,
                base=base,
                head=self.model.head,
                messages=[*known, *messages[len(known) :]],
                tools=base.tools if base else tools,
                changed=base is not None and tools not in (None, base.tools),
            )
        )

    def check_prompt(
        self, turn: PreparedTurn, base: Gen | None, messages: list[Message], tools: list[Tool] | None
    ) -> None:
        prompt, kept = turn.prompt.tolist(), 0
        if base is not None:
            kept = len(base.checkpoint) - base.taken_over
            assert base.taken_over <= self.family.family.max_trim_tokens
            assert prompt[:kept] == base.checkpoint[:kept]
        assert turn.kept == kept
        start = min(len(base.checkpoint) - 1, kept) if base else 0
        sent = json.loads(b"".join(turn.sent()))
        assert sent.get("routed_experts_start_len", 0) == (start if self.model.replay.incremental else 0)
        known = base.messages if base else []
        appended = messages[len(known) :]
        whole = self.family.encode(self.model.whole(base, appended, tools))
        levels = {gen.level for gen in base.path()} if base else set()
        if LOOSE not in levels:
            assert self.family.tokenizer.decode(prompt) == self.family.tokenizer.decode(whole)
        if levels <= {EXACT}:
            assert prompt == whole
        assert min(prompt) >= 0
        assert max(prompt) < self.family.tokenizer.vocab_size
        assert sent["input_ids"] == prompt
        assert sent["messages"] == [*known, *appended]
        assert sent["temperature"] == 0.5
        assert (sent["logprobs"], sent["return_meta_info"], sent["no_stop_trim"]) == (
            True, True, False)  # fmt: skip

    def answer(self, which: int, kind: str, draw: random.Random) -> None:
        pending = self.pending.pop(which)
        prompt = pending.turn.prompt.tolist()
        reply, sampled, level = self.engine.answer(kind, self.twin(pending), draw)
        meta, start = reply["choices"][0]["meta_info"], pending.turn.fields.get("routed_experts_start_len", 0)
        rows = self.rows.add(meta, start, len(prompt) + len(sampled), draw)
        before, marks = self.snapshot(), set(self.model.marks)
        if kind == "broken":
            self.refuse_broken(reply, draw)
            assert self.snapshot() == before
            return
        raw = json.dumps(reply).encode()
        generation = read_reply(raw, vocab_size=self.family.tokenizer.vocab_size, engine="e")
        takes = self.model.accepts(pending) and not self.session.closed
        started = float(next(self.clock))
        done = commit_turn(self.session, pending.turn, generation, self.rules, started=started, ended=started + 0.5)
        assert done is (takes and kind != "abort")
        message = reply["choices"][0]["message"]
        if kind != "abort":  # an agent gets every answer, also one that came too late
            talk = [*copy.deepcopy(pending.messages), copy.deepcopy(message)]
            goes_on = done and generation.finish_reason != "length"
            self.seen.insert(len(self.seen) if goes_on else draw.randrange(len(self.seen)), talk)
        if not done:
            if takes:
                self.model.marks.add(pending.base.id if pending.base else None)
            assert self.snapshot() == before
            assert self.session.abort_marks == (self.model.marks if takes else marks)
            return
        choice = reply["choices"][0]
        role_ids = {self.family.tokenizer.token_to_id(text) for text in TAKEN_OVER.get(self.family.name, ())}
        gen = Gen(
            id=self.model.committed,
            parent=pending.base,
            messages=[*pending.messages, message],
            prompt=prompt,
            sampled=sampled,
            log_probs=[entry[0] for entry in choice["meta_info"]["output_token_logprobs"]],
            tools=pending.tools,
            finish=choice["finish_reason"],
            level=level,
            reply=reply,
            taken_over=1 if sampled and sampled[-1] in role_ids else 0,
            rows=rows,
        )
        self.model.commit(gen, pending)
        self.check_state()

    def twin(self, pending: Pending) -> Message | None:
        """What the same turn was answered with before, so that two generations have equal messages."""
        for gen in reversed(self.model.gens):
            if gen.level == EXACT and gen.finish == "stop" and gen.messages[:-1] == pending.messages:
                return gen.messages[-1]
        return None

    def refuse_broken(self, reply: dict[str, Any], draw: random.Random) -> None:
        """An answer that lacks what a turn needs."""
        meta = reply["choices"][0]["meta_info"]
        entry = meta["output_token_logprobs"][0]
        change: Callable[[], Any] = draw.choice((
            lambda: meta.update(completion_tokens=len(meta["output_token_logprobs"]) + 1),
            lambda: entry.__setitem__(0, None),
            lambda: entry.__setitem__(1, self.family.tokenizer.vocab_size),
            lambda: reply["choices"][0]["message"].update(content=None),
        ))  # fmt: skip
        change()
        with pytest.raises(EngineReplyError):
            read_reply(json.dumps(reply).encode(), vocab_size=self.family.tokenizer.vocab_size, engine="e")

    # -- checks ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        """All that may not change but by a commit."""
        session = self.session
        return (
            list(map(id, session.forest.nodes)),
            session.forest.committed,
            session.tools_changed,
            session.control_tokens,
            [
                (n.id, n.kept, len(n.added), len(n.sampled), n.num_messages, len(n.messages))
                for n in session.forest.nodes
            ],
        )

    def metadata(self) -> dict[str, Any]:
        return session_metadata(self.session, self.family, self.check, {})

    def check_state(self) -> None:
        """After a commit: records, metadata and nodes are what the model says."""
        head = self.model.head
        assert head is not None
        path = head.path()
        shown = [json.loads(record) for record in records(self.session, "all")]
        assert len(shown) == len(path)
        for record, gen in zip(shown, path, strict=True):
            assert record["request"]["messages"] == gen.messages[:-1]
            assert record["request"]["input_ids"] == gen.prompt
            assert record["response"] == gen.reply
            assert record["status_code"] == 200
        assert [json.loads(record) for record in records(self.session, "last")] == shown[-1:]
        metadata = self.metadata()
        assert metadata["accumulated_token_ids"].tolist() == head.checkpoint
        assert metadata.get("aborted", False) is (head.id in self.model.marks)
        assert metadata.get("tools_changed", False) is self.model.tools_changed
        assert metadata["mine"] == 1
        self.check_mismatch(metadata["tito_session_mismatch"], {gen.level for gen in path})
        self.check_nodes()

    def check_mismatch(self, found: list[dict[str, Any]], levels: set[str]) -> None:
        if levels <= {EXACT}:
            assert found == []
        elif LOOSE not in levels:
            assert {difference["type"] for difference in found} <= {"assistant_text"}

    def check_nodes(self) -> None:
        """Nodes hold what is new, and nothing twice."""
        nodes = self.session.forest.nodes
        assert [node.id for node in nodes] == [gen.id for gen in self.model.gens]
        assert self.session.forest.committed == self.model.committed
        for node, gen in zip(nodes, self.model.gens, strict=True):
            parent = gen.parent
            assert (node.parent.id if node.parent else None) == (parent.id if parent else None)
            assert (node.seq, node.truncated) == (gen.id, gen.finish == "length")
            assert node.kept == (len(parent.checkpoint) - parent.taken_over if parent else 0)
            assert node.added.tolist() == gen.prompt[node.kept :]
            assert (node.sampled.tolist(), node.log_probs.tolist()) == (gen.sampled, gen.log_probs)
            assert list(node.messages) == gen.messages[len(parent.messages) if parent else 0 :]
            assert node.tools == gen.tools
        if nodes:
            assert nodes[-1].tokens().tolist() == self.model.gens[-1].checkpoint
        assert self.session.forest.last is (nodes[-1] if nodes else None)
        assert [node.id for node in self.session.forest.leaves()] == [gen.id for gen in self.model.leaves()]

    def limits(self, draw: random.Random, count: int) -> Iterator[int | None]:
        """Values of max_seq_len: none, and ones at, beside and between the places where turns begin and end."""
        yield None
        edges = sorted({at + by for gen in self.model.gens for at in (len(gen.prompt), len(gen.checkpoint))
                        for by in (-1, 0, 1, 2)})  # fmt: skip
        if edges:
            edges += [1, draw.randrange(1, edges[-1] + 1)]
            yield from draw.sample(edges, min(count, len(edges)))

    def check_samples(self, draw: random.Random, count: int) -> None:
        for limit in self.limits(draw, count):
            if self.model.tree:
                self.check_tree_samples(limit)
            elif self.model.head is not None:
                self.check_linear_sample(limit)

    def wanted(self, gen: Gen, limit: int | None) -> Expected | None:
        return expected_sample(gen.path(), limit, self.model.marks, self.model.replay)

    def check_linear_sample(self, limit: int | None) -> None:
        head, last = self.model.head, self.session.forest.last
        assert head is not None
        assert last is not None
        try:
            want = self.wanted(head, limit)
        except Gap:
            with pytest.raises(SampleError, match="has no routing rows"):
                assemble_path(self.session, last.path(), self.family, max_seq_len=limit, replay=self.model.replay)
            return
        sample = assemble_path(self.session, last.path(), self.family, max_seq_len=limit, replay=self.model.replay)
        assert (sample is None) is (want is None)
        if sample is not None and want is not None:
            self.check_sample(sample, want, {owner for owner in want.owners if owner}, limit)

    def tree_samples(self, tree: dict[str, Any], limit: int | None) -> list[AssembledSample]:
        agent = {"reward": 0.5, "leaf": "forged", "note": "n"}
        metadata = {**self.metadata(), "tree": tree, "agent": agent}
        hooks = (SampleHook("pick", pick_samples), SampleHook("post", postprocess_samples))
        replay = self.model.replay
        return leaf_samples(self.session, self.family, metadata, *hooks, max_seq_len=limit, replay=replay)

    def check_tree_samples(self, limit: int | None) -> None:
        model, tree = self.model, tree_metadata(self.session.forest)
        try:
            wanted = {leaf.id: self.wanted(leaf, limit) for leaf in model.leaves()}
        except Gap:
            with pytest.raises(SampleError, match="has no routing rows"):
                self.tree_samples(tree, limit)
            return
        samples = self.tree_samples(tree, limit)
        kept = [leaf for leaf in model.leaves() if not model.superseded(leaf) and wanted[leaf.id] is not None]
        kept.sort(key=lambda leaf: (-len(leaf.path()), -leaf.id))
        assert [sample.metadata["leaf"]["node_id"] for sample in samples] == [leaf.id for leaf in kept]
        first = {gen.id: min(leaf.id for leaf in kept if gen in leaf.path()) for leaf in kept for gen in leaf.path()}
        trained: Counter[tuple[int, int]] = Counter()
        for sample, leaf in zip(samples, kept, strict=True):
            want = wanted[leaf.id]
            assert want is not None
            mine = {owner for owner in want.owners if owner and first[owner[0]] == leaf.id}
            trained.update(self.check_sample(sample, want, mine, limit))
            place = sample.metadata["leaf"]
            assert place["path_node_ids"] == [gen.id for gen in leaf.path()]
            assert place["parent"] == (leaf.parent.id if leaf.parent else None)
            assert place["response_id"] == leaf.reply["id"]
            assert (sample.reward, sample.metadata["note"]) == (0.5, "n")
        assert all(count == 1 for count in trained.values())
        assert set(trained) == self.owed(limit)
        self.check_tree_metadata(tree)

    def owed(self, limit: int | None) -> set[tuple[int, int]]:
        """Every sampled token but superseded ones, ones a next turn took over, and ones beyond the limit or a gap."""
        leaves, replay = self.model.leaves(), self.model.replay
        return {
            (gen.id, at)
            for gen in self.model.gens
            if not (gen in leaves and self.model.superseded(gen))
            and without_gap([step.rows for step in gen.path()], replay)
            for at in range(len(gen.sampled) - (0 if gen in leaves else gen.taken_over))
            if limit is None or len(gen.prompt) + at < limit
        }

    def check_lines(self, draw: random.Random) -> None:
        """Each path of a tree, told as a linear session, is the same sample."""
        for leaf, gen in zip(self.session.forest.leaves(), self.model.leaves(), strict=True):
            if without_gap([step.rows for step in gen.path()], self.model.replay):
                assert_same_samples(self.session, leaf, self.rules, [None, *self.limits(draw, 3)])

    def check_tree_metadata(self, tree: dict[str, Any]) -> None:
        assert [
            (n["id"], n["parent"], n["seq"], n["truncated"], n["completion_span"], n["num_tokens"], n["response_id"])
            for n in tree["nodes"]
        ] == [
            (g.id, g.parent.id if g.parent else None, g.id, g.finish == "length",
             [len(g.prompt), len(g.checkpoint)], len(g.checkpoint), g.reply["id"])
            for g in self.model.gens
        ]  # fmt: skip
        assert tree["leaves"] == [
            {"node_id": leaf.id, "path_node_ids": [gen.id for gen in leaf.path()]} for leaf in self.model.leaves()
        ]

    def check_sample(
        self, sample: AssembledSample, want: Expected, trained: set[tuple[int, int]], limit: int | None
    ) -> list[tuple[int, int]]:
        """The sample is as expected, and trains just these tokens; they are returned, one for each mask entry of 1."""
        assert sample.tokens.tolist() == want.tokens
        mask, values = sample.loss_mask.tolist(), sample.rollout_log_probs.tolist()
        assert len(mask) == len(values) == sample.response_length == len(want.owners) <= len(want.tokens)
        assert limit is None or len(want.tokens) <= limit
        assert mask == [1 if owner in trained else 0 for owner in want.owners]
        assert values == want.log_probs
        gens = {gen.id: gen for gen in want.used}
        response = want.tokens[len(want.tokens) - len(mask) :]
        for on, value, token, owner in zip(mask, values, response, want.owners, strict=True):
            if on:
                assert owner is not None
                gen, at = gens[owner[0]], owner[1]
                assert (value, token) == (gen.log_probs[at], gen.sampled[at])
        assert sample.response == self.family.tokenizer.decode(response)
        assert sample.status in want.statuses
        metas = [gen.reply["choices"][0]["meta_info"] for gen in want.used]
        assert sample.weight_versions == [meta["weight_version"] for meta in metas]
        assert sample.prefix_cache_info == {
            "cached_tokens": sum(meta["cached_tokens"] for meta in metas),
            "total_prompt_tokens": sum(meta["prompt_tokens"] for meta in metas),
        }
        assert [row["turn"] for row in sample.metadata["lifecycle"]] == list(range(len(metas)))
        rows = [gen.rows for gen in want.used]
        check_rows(sample.rollout_routed_experts, rows, "routed_experts", len(want.tokens))
        check_rows(sample.rollout_indexer_topk, rows, "indexer_topk", len(want.tokens))
        sample.check()
        return [owner for on, owner in zip(mask, want.owners, strict=True) if on and owner]


Step = tuple[str, str, bool, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(ASKS), st.sampled_from(REPLIES), st.booleans(), st.integers(0, 2**20)),
    min_size=6,
    max_size=16,
)
few = settings(
    derandomize=True,
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def play(world: World, steps: Sequence[Step]) -> None:
    """Ask, and let turns end: at once, or later and in any order; the last ones perhaps after the session's end."""
    for how, reply, waits, seed in steps:
        draw = random.Random(seed)
        world.ask(how, draw)
        while len(world.pending) > (3 if waits else 0):
            kind = reply if draw.random() < 0.7 else draw.choice(REPLIES)
            world.answer(draw.randrange(len(world.pending)), kind, draw)
            if len(world.pending) <= 3 and draw.random() < 0.3:
                break
        world.check_samples(draw, 2)
    draw = random.Random(len(steps))
    while world.pending:
        world.answer(draw.randrange(len(world.pending)), draw.choice(REPLIES), draw)
    world.check_samples(draw, 12)
    if world.model.gens:
        before = world.snapshot()
        world.ask("fresh" if world.model.tree else "resend", draw)
        world.session.closed = True
        while world.pending:
            world.answer(0, "said", draw)
        assert world.snapshot() == before


@pytest.mark.parametrize("name", FAMILIES)
@few
@given(steps=STEPS, limit=st.sampled_from((1, 1, 0, 2)), refuse_tools=st.booleans(), replay=st.sampled_from(REPLAYS))
def test_linear(name: str, steps: list[Step], limit: int, refuse_tools: bool, replay: Replay) -> None:
    play(World(name, tree=False, limit=limit, refuse_tools=refuse_tools, replay=replay), steps)


@pytest.mark.parametrize("name", FAMILIES)
@few
@given(steps=STEPS, limit=st.sampled_from((1024, 1024, 5)), keyed=st.booleans(), replay=st.sampled_from(REPLAYS))
def test_tree(name: str, steps: list[Step], limit: int, keyed: bool, replay: Replay) -> None:
    world = World(name, tree=True, limit=limit, keyed=keyed, replay=replay)
    play(world, steps)
    world.check_lines(random.Random(len(steps)))
