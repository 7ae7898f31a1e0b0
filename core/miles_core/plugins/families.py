"""Families as plugins: loading one, or all of them to find out which a checkpoint is (`--tito-model auto`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from miles_core.errors import ConfigError, MilesError, PluginContractError
from miles_core.plugins.plugin import Plugin
from miles_core.plugins.records import PluginRecord
from miles_core.plugins.registry import Registry
from miles_core.tito import TitoFamily
from miles_core.tito.checkpoint import Checkpoint, read_checkpoint
from miles_core.tito.detect import Confidence, Detection, Skipped, detect

AUTO = "auto"
"""The selector that stands for whichever family the checkpoint is."""

BEST_EFFORT = "best effort: turns are not proven to append, and reasoning and tool calls are not parsed"
"""The limits of a family that follows any checkpoint's template."""

log = logging.getLogger("miles.tito")


def family_of(plugin: Plugin) -> TitoFamily:
    """The facts that a family's plugin gives. Raises PluginContractError if it gives something else."""
    family = plugin.call("tito_family")
    if not isinstance(family, TitoFamily):
        raise PluginContractError(
            f"{plugin.describe()}: tito_family returned {type(family).__name__}, expected a TitoFamily"
        )
    return family


def detect_family(registry: Registry, checkpoint: Checkpoint) -> Detection:
    """Judge every installed family; one that cannot be loaded is skipped and named, never an error."""
    families: list[tuple[str, TitoFamily]] = []
    skipped: list[Skipped] = []
    for record in registry.records:
        if record.kind != "family":
            continue
        selector = _shortest(registry, record)
        try:
            families.append((selector, family_of(registry.load_record(record))))
        except MilesError as error:
            skipped.append(Skipped(selector=selector, reason=error.message))
    return detect(checkpoint, families, skipped)


def resolve(registry: Registry, selector: str, checkpoint: str) -> str:
    """The family's selector; `auto` becomes the one that the checkpoint surely is.

    Raises ConfigError with the candidates when none is sure enough, or two are.
    """
    if selector.strip() != AUTO:
        if selector.strip().startswith(f"{AUTO}@"):
            raise ConfigError(f"--tito-model {selector}: auto finds the revision too\n  write auto, or name the family")
        return selector
    found = detect_family(registry, read_checkpoint(checkpoint))
    if found.chosen is None:
        raise ConfigError(f"--tito-model auto: {unsure(found, checkpoint)}")
    chosen = found.chosen
    level = logging.INFO if chosen.confidence is Confidence.CERTAIN else logging.WARNING
    log.log(level, "--tito-model auto: taking %s, %s", chosen.selector, chosen.brief)
    return chosen.selector


def unsure(found: Detection, checkpoint: str) -> str:
    """Why no family is taken, with the candidates and what was not tried, and what to do."""
    head = f"it is not sure which family {checkpoint} is" if found.fitting else f"no installed family fits {checkpoint}"
    lines = [head, *(f"{candidate.selector} is {candidate.brief}" for candidate in found.fitting)]
    lines += [f"{skipped.selector} was not tried: {skipped.reason.splitlines()[0]}" for skipped in found.skipped]
    return "\n  ".join([*lines, *advice(found, checkpoint)])


def advice(found: Detection, checkpoint: str) -> Iterator[str]:
    """What to do next, a line each."""
    if found.chosen is not None:
        chosen = found.chosen.selector
        yield f"choose it with --tito-model {chosen}, or auto"
        yield f"prove it with miles-plugins verify template --checkpoint {checkpoint} --tito-model {chosen}"
        return
    if found.fitting:
        yield f"--tito-model NAME takes one all the same; miles-plugins detect {checkpoint} --json has every reason"
    for selector in found.fallbacks:
        yield f"--tito-model {selector} follows the checkpoint's own template, {BEST_EFFORT}"
    yield "or write a family for it: miles-plugins new family NAME, see docs/write_a_plugin.md"


def _shortest(registry: Registry, record: PluginRecord) -> str:
    """The shortest text that chooses this record."""
    try:
        return record.name if registry.find(record.kind, record.name) is record else record.selector
    except MilesError:
        return record.selector
