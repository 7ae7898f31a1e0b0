"""For families whose generation prompt opens the reasoning block: reading a generation that starts inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_core.tito import BoundFamily
from miles_core.types import Message


class OpenedReasoning(BoundFamily):
    """Sampled ids that close a reasoning block they never opened are read as if they had opened it.

    Only where all ids are at hand: whoever parses as they come feeds the end of the prompt first.
    """

    def parse(self, ids: Sequence[int], tools: Any = None, *, calls: bool = True, reasoning: bool = True) -> Message:
        """The message that sampled `ids` spell; total."""
        facts = self.family.parse_facts
        if reasoning and facts.reasoning is not None:
            opener, closer = self.tokenizer.ids_of(facts.reasoning, needed_by=f"family {self.name}")
            if closer in ids and opener not in ids[: list(ids).index(closer)]:
                ids = [*self.encode(facts.reasoning[0] + facts.around_reasoning), *ids]
        return super().parse(ids, tools, calls=calls, reasoning=reasoning)
