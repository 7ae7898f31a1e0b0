"""A finished turn enters the history: what is stored of it, and what the session's metadata says of it."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

from miles_core.session.answer import kept_answer
from miles_core.session.reply import Generation
from miles_core.session.sharing import beside, shared_fields, shared_ids, shared_messages
from miles_core.session.tree import Node, TurnFacts, path_messages
from miles_core.session.turn import PreparedTurn, Session, TurnRules
from miles_core.session.weights import weight_versions

log = logging.getLogger("miles.session")


def commit_turn(
    session: Session,
    turn: PreparedTurn,
    generation: Generation,
    rules: TurnRules,
    *,
    started: float,
    ended: float,
) -> bool:
    """Put a finished turn into the history; False if the session was closed or has moved on meanwhile.

    An aborted generation is not committed; it marks the place it started from. Times are epoch seconds.
    """
    if session.closed or not rules.policy.accepts(session.forest, turn.position):
        return False
    base = turn.position.base
    place = base.id if base else None
    if generation.aborted:
        session.abort_marks.add(place)
        return False
    near = beside(session.forest, base)
    node = Node(
        id=session.forest.committed,
        seq=session.forest.committed,
        parent=base,
        messages=shared_messages((*turn.position.appended, generation.message), near),
        kept=turn.kept,
        added=shared_ids(turn.added, near),
        sampled=generation.sampled,
        log_probs=generation.log_probs,
        tools=base.tools if base else session.forest.keep_tools(turn.tools, turn.tools_key),
        request=shared_fields(turn.fields, near),
        answer=kept_answer(generation.raw, generation.meta, [node.answer for node in near]),
        facts=_facts(generation, turn.kept + len(turn.added), started, ended),
        encoded=turn.encoded,
    )
    if turn.position.discarded:
        _note_rollback(session, turn)
    rules.policy.commit(session.forest, node, turn.keys)
    if turn.line.node is base:
        turn.line.grow(node, turn.new)
        session.forest.line = turn.line
    rules.lines.used(session.forest)
    session.abort_marks.discard(place)
    session.tools_changed = session.tools_changed or turn.tools_changed
    session.control_tokens += turn.control_tokens
    return True


def _note_rollback(session: Session, turn: PreparedTurn) -> None:
    """Say that generations were replaced: an agent that changes what it replays loses turns of its sample."""
    position = turn.position
    session.rolled_back += position.discarded
    if position.diverged is None or position.head is None:
        return
    stored = next(islice(path_messages(position.head), position.diverged, None))
    replayed = position.appended[position.diverged - (position.base.num_messages if position.base else 0)]
    keys = sorted(k for k in stored.keys() | replayed.keys() if (stored.get(k) or None) != (replayed.get(k) or None))
    session.diverged = {"message": position.diverged, "role": stored.get("role"), "keys": keys}
    log.warning(
        "session %s: message %d was not replayed as stored (it differs in %s): %d generation(s) replaced",
        session.id,
        position.diverged,
        ", ".join(keys),
        position.discarded,
    )


def _facts(generation: Generation, prompt_tokens: int, started: float, ended: float) -> TurnFacts:
    meta = generation.meta
    names = {
        "spec_accept_token_num": ("spec_accept_token_num", "spec_num_correct_drafts"),
        "spec_draft_token_num": ("spec_draft_token_num", "spec_num_proposed_drafts"),
        "spec_verify_ct": ("spec_verify_ct",),
    }
    spec = {key: next(filter(None, (_count(meta.get(name)) for name in found)), 0) for key, found in names.items()}
    response_id = generation.reply.get("id")
    versions, ends = weight_versions(meta, len(generation.sampled))
    return TurnFacts(
        finish_reason=generation.finish_reason,
        response_id=response_id if isinstance(response_id, str) else None,
        prompt_tokens=_count(meta.get("prompt_tokens")) or prompt_tokens,
        cached_tokens=_count(meta.get("cached_tokens")),
        weight_versions=versions,
        version_ends=ends,
        spec=spec,
        request_timestamp=started,
        timestamp=ended,
    )


def _count(value: Any) -> int:
    """A counter of the engine's; 0 if it is none, or none that could be true."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        return 0
    return int(value)
