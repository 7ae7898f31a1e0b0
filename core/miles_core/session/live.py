"""A streamed answer of the engine: what of it goes to the agent when, and the whole answer it amounts to.

Every token's log-probability comes with the chunks, the ids come in a late one. The chunk that says why the generation
ended, and what follows it, is held back until they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from miles_core.errors import EngineFault, EngineReplyError, InexactStream
from miles_core.session.body import MAX_DEPTH, short, too_deep
from miles_core.session.deltas import DeltaError, Deltas
from miles_core.session.reply import Generation, check_reply

DONE = b"[DONE]"

EXTENSION = {
    "return_cached_tokens_details": "cached_tokens_details",
    "return_spec_tokens_details": "spec_tokens_details",
    "return_input_ids_in_sglext": "input_ids",
    "return_output_ids_in_sglext": "output_ids",
}
"""Fields of a request, and what each adds to the `sglext` of its answer."""

REPLACEMENT = "\ufffd"
"""What part of a character decodes to."""


class LiveReply:
    """Reads the events of one stream. `asked` are the fields of the agent's request, `spell` decodes one id."""

    def __init__(
        self,
        *,
        engine: str,
        vocab_size: int,
        spell: Callable[[int], str],
        asked: Mapping[str, Any],
        include_usage: bool,
    ) -> None:
        self.done = False
        """Whether the engine has said that it is over."""
        self._engine, self._vocab_size, self._spell = engine, vocab_size, spell
        self._shown = {key for name, key in EXTENSION.items() if asked.get(name)}
        self._include_usage = include_usage
        self._deltas = Deltas()
        self._head: dict[str, Any] = {}
        self._finish: str | None = None
        self._matched: Any = None
        self._log_probs: list[Any] = []
        self._extension: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._held: list[bytes] = []

    # -- events ------------------------------------------------------------------------------------------------

    def take(self, data: bytes) -> list[bytes]:
        """An event of the engine's: the data of events that go to the agent now.

        Raises EngineFault if it is an error, with the engine's own status, and EngineReplyError if it is no chunk.
        """
        if data.strip() == DONE:
            self.done = True
            return []
        chunk = self._read(data)
        choice = self._choice(chunk)
        self._keep(chunk)
        if choice is None:
            shown = self._without_hidden(chunk)
            self._held += [] if shown is None else [data if shown is chunk else orjson.dumps(shown)]
            return []
        if "sglext" in chunk:
            chunk = self._without_hidden(chunk) or {key: value for key, value in chunk.items() if key != "sglext"}
            data = orjson.dumps(chunk)
        events = self._add(chunk, choice, data)
        if self._finish is None:
            return events
        self._held += events
        return []

    def _read(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise self._odd(f"an event that is not JSON ({error})") from error
        if not isinstance(chunk, dict):
            raise self._odd(f"an event that is no object ({short(chunk)})")
        if data.count(b"[") + data.count(b"{") > MAX_DEPTH and too_deep(chunk):
            raise self._odd(f"an event nested more than {MAX_DEPTH} levels deep")
        fault = chunk.get("error")
        if fault is None and chunk.get("object") == "error":
            fault = chunk
        if fault is not None:
            raise engine_fault(fault)
        return chunk

    def _choice(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """The generation's part of a chunk; None for a chunk about the whole answer."""
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise self._odd(f"a chunk without a list of choices ({short(choices)})")
        if len(choices) > 1 or any(choice.get("index") not in (0, None) for choice in choices):
            raise self._odd("a chunk of another choice than the one that was asked for")
        return choices[0] if choices else None

    def _keep(self, chunk: dict[str, Any]) -> None:
        for key in ("id", "created", "model", "system_fingerprint"):
            if chunk.get(key) is not None:
                self._head.setdefault(key, chunk[key])
        if isinstance(chunk.get("sglext"), dict):
            self._extension.update(chunk["sglext"])
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]

    def _without_hidden(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """A chunk about the whole answer as the agent gets it; None if it has not asked for it."""
        extension = chunk.get("sglext")
        if isinstance(extension, dict):
            kept = {key: value for key, value in extension.items() if key in self._shown}
            return {**chunk, "sglext": kept} if kept else None
        if chunk.get("usage") is not None and not self._include_usage:
            return None
        return chunk

    def _add(self, chunk: dict[str, Any], choice: dict[str, Any], data: bytes) -> list[bytes]:
        """Keep what a chunk adds; its events."""
        log_probs = choice.get("logprobs")
        content = log_probs.get("content") if isinstance(log_probs, dict) else None
        if content is not None:
            if not isinstance(content, list):
                raise self._odd(f"log-probabilities that are no list ({short(content)})")
            self._log_probs += content
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise self._odd(f"a delta that is no object ({short(delta)})")
        try:
            parts = self._deltas.add(delta)
        except DeltaError as error:
            raise self._odd(str(error)) from error
        if choice.get("finish_reason") is not None:
            self._finish, self._matched = str(choice["finish_reason"]), choice.get("matched_stop")
        if (not parts or parts[0] == delta) and b"\n" not in data:
            return [data]
        chunks = [{**chunk, "choices": [{**choice, "delta": part}]} for part in parts]
        for later in chunks[1:]:
            later["choices"][0]["logprobs"] = None
        for earlier in chunks[:-1]:
            earlier["choices"][0]["finish_reason"] = None
        return [orjson.dumps(each) for each in chunks]

    def held(self) -> list[bytes]:
        """The data of the events that were held back, `[DONE]` included; for when the turn is committed."""
        return [*self._held, DONE]

    @property
    def sampled(self) -> int:
        """How many tokens have come."""
        return len(self._log_probs)

    # -- the whole answer --------------------------------------------------------------------------------------

    def generation(self, weight_versions: tuple[str, ...]) -> Generation:
        """What the stream amounts to, checked like an answer that comes whole; call when it is `done`.

        `weight_versions` are those it was sampled with, as far as is known. Raises InexactStream where ids and
        log-probabilities do not agree, and EngineReplyError for what else makes no turn.
        """
        if self._finish is None:
            raise self._odd("no finish_reason before the end of its stream")
        entries = [] if self._finish == "abort" else self._entries()
        reply = self._whole(entries, weight_versions)
        return check_reply(reply, orjson.dumps(reply), vocab_size=self._vocab_size, engine=self._engine)

    def _entries(self) -> list[list[Any]]:
        """`[log-probability, id, text]` of every sampled token."""
        lists = self._extension.get("output_ids")
        ids = lists[0] if isinstance(lists, list) and lists else None
        if not isinstance(ids, list):
            raise InexactStream(
                f"the stream of the engine at {self._engine} lacks sglext.output_ids, the ids that were sampled"
            )
        if len(ids) != len(self._log_probs):
            raise InexactStream(
                f"the stream of the engine at {self._engine} has {len(self._log_probs)} log-probabilities for "
                f"{len(ids)} sampled tokens; SGLang leaves some out unless --reasoning-parser or --tool-call-parser is "
                "set"
            )
        return [
            self._entry(at, token, entry) for at, (token, entry) in enumerate(zip(ids, self._log_probs, strict=True))
        ]

    def _entry(self, position: int, token: Any, entry: Any) -> list[Any]:
        if not isinstance(entry, dict):
            raise self._odd(f"the log-probability {short(entry)} for sampled token {position}")
        text = entry.get("token")
        known = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < self._vocab_size
        if known and isinstance(text, str) and not same_token(self._spell(token), text):
            raise InexactStream(
                f"the stream of the engine at {self._engine} has the log-probability of {text!r} for sampled token "
                f"{position}, whose id {token} is {self._spell(token)!r}"
            )
        return [entry.get("logprob"), token, text]

    def _whole(self, entries: list[list[Any]], weight_versions: tuple[str, ...]) -> dict[str, Any]:
        finish = str(self._finish)
        choice = {
            "index": 0,
            "message": self._deltas.message(),
            "logprobs": {"content": self._log_probs},
            "finish_reason": finish,
            "matched_stop": self._matched,
            "meta_info": self._meta(entries, weight_versions),
        }
        whole: dict[str, Any] = {**self._head, "object": "chat.completion", "choices": [choice], "usage": self._usage}
        extension = {key: value for key, value in self._extension.items() if key in self._shown}
        return {**whole, "sglext": extension} if extension else whole

    def _meta(self, entries: list[list[Any]], weight_versions: tuple[str, ...]) -> dict[str, Any]:
        """What an answer that comes whole has in `meta_info`, as far as streams tell it."""
        finish, usage = str(self._finish), self._usage or {}
        ended: dict[str, Any] = {"type": finish, "matched": self._matched}
        if finish == "length":
            ended = {"type": finish, "length": len(entries)}
        meta: dict[str, Any] = {
            "id": self._head.get("id"),
            "finish_reason": ended,
            "prompt_tokens": usage.get("prompt_tokens"),
            "output_token_logprobs": entries,
            "output_token_logprobs_length": len(entries),
            "reasoning_tokens": usage.get("reasoning_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "cached_tokens": _cached(self._extension.get("cached_tokens_details")),
            "cached_tokens_details": self._extension.get("cached_tokens_details"),
        }
        if weight_versions:
            meta["weight_version"] = weight_versions[-1]
        if len(weight_versions) > 1:
            meta["weight_versions"] = [{"version": version} for version in weight_versions]
        speculated = self._extension.get("spec_tokens_details")
        if isinstance(speculated, dict):
            meta.update({key: value for key, value in speculated.items() if key.startswith("spec_")})
        if self._extension.get("routed_experts") is not None:
            meta["routed_experts"] = self._extension["routed_experts"]
        return meta

    def _odd(self, what: str) -> EngineReplyError:
        return EngineReplyError(f"the engine at {self._engine} sent {what}")


def same_token(ours: str, theirs: str) -> bool:
    """Whether two spellings may be of one token: decoders differ in white space, and in parts of characters."""
    return ours == theirs or REPLACEMENT in ours + theirs or "".join(ours.split()) == "".join(theirs.split())


def _cached(details: Any) -> int:
    """How many tokens of the prompt were cached, wherever they were found."""
    counts = details.values() if isinstance(details, dict) else ()
    return sum(count for count in counts if isinstance(count, int) and not isinstance(count, bool))


def engine_fault(fault: Any) -> EngineFault:
    """An error that the engine reports inside a stream, with the status it names."""
    facts = fault if isinstance(fault, dict) else {"message": fault}
    status, kind = facts.get("code"), facts.get("type")
    valid = isinstance(status, int) and not isinstance(status, bool) and 400 <= status <= 599
    return EngineFault(
        str(facts.get("message") or fault),
        status=status if valid else None,
        kind=kind if isinstance(kind, str) else None,
    )
