"""Which revision of a family a checkpoint is: the one whose text agrees with the checkpoint's own template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import MilesError
from miles_core.tito.probes import ProbeResult, compare_with_template
from miles_core.tito.render import ChatTemplate
from miles_core.tito.tokenizer import Tokenizer, load_chat_template, special_token_variables

if TYPE_CHECKING:
    from miles_core.tito.family import Revision, TitoFamily
    from miles_core.tito.render import Renderer

log = logging.getLogger("miles.tito")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A revision, in words how it was found, and what the checkpoint's template says of it.

    `clear` is false where the checkpoint does not tell, and the declared default was taken.
    """

    revision: Revision
    how: str
    clear: bool = True
    results: Sequence[ProbeResult] = ()


def choose_revision(family: TitoFamily, tokenizer: Tokenizer, checkpoint: str | Path | None) -> tuple[Revision, str]:
    """The revision of a checkpoint when none was named, and in words how it was found.

    By the checkpoint's own template, else by its config, else the declared default (logged as a warning).
    """
    if len(family.revisions) == 1:
        return family.revisions[0], "the only one"
    choice = rank_revisions(family, tokenizer.config, _own_template(checkpoint) if checkpoint else None)
    if not choice.clear:
        log.warning(
            "family %s has the revisions %s, and the checkpoint does not tell which it is: taking %s; name it with "
            "--tito-model %s@REVISION", family.name, ", ".join(r.name for r in family.revisions), choice.revision.name,
            family.name,
        )  # fmt: skip
    return choice.revision, choice.how


def rank_revisions(family: TitoFamily, config: Mapping[str, Any], template: Renderer | None) -> Choice:
    """The revision that fits a checkpoint's template best, else its config, else the default.

    The results of comparing with the template are there also where only one revision stands to choose from.
    """
    revisions = family.revisions
    results = {r.name: compare_with_template(family, r, template) for r in revisions} if template is not None else {}

    def choice(revision: Revision, how: str, *, clear: bool = True) -> Choice:
        return Choice(revision=revision, how=how, clear=clear, results=results.get(revision.name, ()))

    if len(revisions) == 1:
        return choice(revisions[0], "the only one")
    scores = [sum(result.agrees for result in results.get(r.name, ())) for r in revisions]
    if max(scores) and scores.count(max(scores)) == 1:
        return choice(revisions[scores.index(max(scores))], "by the checkpoint's template")
    for revision in revisions:
        if revision.config and all(_config_value(config, k) == v for k, v in revision.config.items()):
            return choice(revision, "by the checkpoint's config")
    named = [r for r in revisions if config.get("model_type") in r.model_types]
    if len(named) == 1:
        return choice(named[0], "by the checkpoint's model_type")
    return choice(revisions[0], "the default", clear=False)


def _config_value(config: Mapping[str, Any], key: str) -> Any:
    """A config's value; `a.b` looks inside."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _own_template(checkpoint: str | Path) -> Renderer | None:
    """The checkpoint's own template; none if it has none, or one that does not compile."""
    text = load_chat_template(checkpoint)
    if text is None:
        return None
    try:
        return ChatTemplate(text, source=str(checkpoint), variables=special_token_variables(checkpoint))
    except MilesError:
        return None
