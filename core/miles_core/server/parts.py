"""What a session server is made of: the family, matcher and hooks that its settings name, loaded and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError, RequestError
from miles_core.plugins import Plugin, Registry
from miles_core.plugins.families import family_of, resolve
from miles_core.server.settings import ServerSettings
from miles_core.session.leaves import SampleHook
from miles_core.session.routing import Replay
from miles_core.tito import BoundFamily, ChatTemplate, load_tokenizer
from miles_core.tito.drift import check_template
from miles_core.tito.tokenizer import special_token_variables


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The plugins a server was told to use, loaded and bound."""

    family: BoundFamily
    matcher: Plugin
    pick: Plugin | None
    postprocess: Plugin | None
    plugins: tuple[str, ...]


def load_family(
    registry: Registry, selector: str, checkpoint: str, template_path: str | None, *, fast: bool = False
) -> tuple[BoundFamily, Plugin]:
    """The selected family (`auto`: the one detected) bound to the checkpoint, `fast` with an encoder for servers.

    Raises PluginError or ConfigError.
    """
    plugin = registry.load("family", resolve(registry, selector, checkpoint))
    family = family_of(plugin)
    tokenizer, template = load_tokenizer(checkpoint, fast=fast), None
    if template_path is not None:
        try:
            text = Path(template_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template-path {template_path}: {error}") from error
        template = ChatTemplate(text, source=template_path, variables=special_token_variables(tokenizer.source))
    with plugin.guard("tito_family"):  # a family may bring a class of its own to bind
        return family.bind(tokenizer, plugin.revision, template=template), plugin


def load_parts(settings: ServerSettings, registry: Registry) -> Parts:
    """Load and check everything a server needs, so that faults show at start-up."""
    if settings.workers > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads that it starts now are not there in forked processes
    family, plugin = load_family(
        registry, settings.tito_model, settings.checkpoint, settings.chat_template_path, fast=True
    )
    try:
        family.merge_kwargs(settings.chat_template_kwargs)
    except RequestError as error:
        raise ConfigError(f"--apply-chat-template-kwargs: {error.message}") from error
    check_template(family, strict=settings.strict_template)
    matcher = registry.load("matcher", settings.message_matcher)
    pick = postprocess = None
    if settings.history == "tree":
        pick = registry.load("sample-hook", settings.pick_samples, hook="pick_samples")
        postprocess = registry.load("sample-hook", settings.postprocess_samples, hook="postprocess_samples")
        _require_hook(pick, "pick_samples", "--pick-samples")
        _require_hook(postprocess, "postprocess_samples", "--postprocess-samples")
    loaded = [part for part in (plugin, matcher, pick, postprocess) if part is not None]
    return Parts(
        family=family,
        matcher=matcher,
        pick=pick,
        postprocess=postprocess,
        plugins=tuple(part.describe() for part in loaded),
    )


def replay_of(settings: ServerSettings, config: Mapping[str, Any]) -> Replay:
    """What to record for routing replay. Raises ConfigError if the checkpoint's config has no layer count."""
    layers = config.get("num_hidden_layers") or (config.get("text_config") or {}).get("num_hidden_layers") or 0
    if settings.routing_replay and not layers:
        raise ConfigError(
            f"--use-rollout-routing-replay needs num_hidden_layers in the config.json of {settings.checkpoint}"
        )
    return Replay(
        experts=settings.routing_replay,
        indexer=settings.indexer_replay,
        incremental=settings.incremental_replay,
        layers=int(layers),
    )


def _require_hook(plugin: Plugin, hook: str, flag: str) -> None:
    if not plugin.has(hook):
        raise ConfigError(f"{flag}: {plugin.describe()} has no hook {hook}")


def sample_hook(plugin: Plugin, hook: str) -> SampleHook:
    """A sample hook of a plugin, bound."""
    return SampleHook(f"{hook} of {plugin.describe()}", lambda samples, metadata: plugin.call(hook, samples, metadata))
