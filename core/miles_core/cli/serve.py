"""`miles-plugins serve`: the session server in the foreground."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from miles_core.cli.engine_flags import check_engine_flags, serving_urls
from miles_core.cli.flags import HISTORIES, check_is_no_address, located, template_kwargs
from miles_core.cli.output import write
from miles_core.errors import ConfigError

if TYPE_CHECKING:
    from miles_core.plugins import Registry
    from miles_core.server.parts import Parts
    from miles_core.server.settings import ServerSettings
    from miles_core.tito import BoundFamily


@click.command(
    "serve", help="Run the session server. Flags of an engine that we start follow the others.",
    epilog="Several --engine URLs share the sessions.", context_settings={"ignore_unknown_options": True},
)  # fmt: skip
@click.option("--checkpoint", "--hf-checkpoint", metavar="DIR|ID", help="The tokenizer; --model's by default.")
@click.option("--model", metavar="DIR|ID", help="The weights, for an engine we start; --checkpoint by default.")
@click.option("--tito-model", required=True, metavar="FAMILY[@REVISION]", help="The model family, or auto.")
@click.option(
    "--engine", "engines", multiple=True, required=True, metavar="URL|NAME", help="Engine URLs, or one engine's name."
)
@click.option("--host", "--session-server-ip", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", "--session-server-port", type=click.IntRange(0, 65535), default=8100, show_default=True,
    help="Port; 0 takes a free one.",
)  # fmt: skip
@click.option("--workers", default=1, show_default=True, help="Processes that share the port and the sessions.")
@click.option("--history", type=click.Choice(["linear", "tree"]), default=None, help="How histories grow.  [linear]")
@click.option(
    "--use-session-server", is_flag=False, flag_value="v1", default=None, type=click.Choice(["v1", "v2"]),
    help="--history under its older name: v1 is linear, v2 is tree.",
)  # fmt: skip
@click.option(
    "--message-matcher", "--session-message-matcher", default="strict", show_default=True, metavar="NAME",
    help="Who decides whether a replayed message is the stored one.",
)  # fmt: skip
@click.option(
    "--pick-samples", "--session-sample-picker-path", default="drop_retries", show_default=True, metavar="NAME",
    help="Tree histories: which leaves become samples.",
)  # fmt: skip
@click.option(
    "--postprocess-samples", "--session-sample-postprocessor-path", default="shared_prefix_mask", show_default=True,
    metavar="NAME", help="Tree histories: what is done to the picked samples.",
)  # fmt: skip
@click.option(
    "--compat", type=click.Choice(["miles"]),
    help="Take miles' names of sample hooks, and make what they import importable where miles is not installed.",
)  # fmt: skip
@click.option("--max-rollback", default=1, show_default=True, help="Generations a retry may discard.")
@click.option("--api-key", envvar="MILES_API_KEY", default=None, help="Key that clients must send (or MILES_API_KEY).")
@click.option("--engine-api-key", envvar="MILES_ENGINE_API_KEY", default=None, help="Key to send to the engine.")
@click.option(
    "--engine-health-seconds", default=5.0, show_default=True, help="Between checks of an engine's health; 0 is none."
)
@click.option("--admin-api-key", envvar="MILES_ADMIN_API_KEY", default=None, help="Key that opens /admin/engines.")
@click.option("--public-url", default=None, help="URL under which agents reach this server.")
@click.option("--max-body-mb", default=64.0, show_default=True, help="Larger request bodies are refused.")
@click.option("--max-sessions", default=0, help="Open sessions at most; 0 is no limit.")
@click.option("--max-concurrent", default=0, help="Turns in flight at most; 0 is no limit.")
@click.option("--apply-chat-template-kwargs", default=None, metavar="JSON", help="Template kwargs of every session.")
@click.option(
    "--chat-template-path", default=None, metavar="FILE",
    help="A chat template; only for --tito-model default, since a named family brings its own.",
)  # fmt: skip
@click.option("--strict-template", is_flag=True, help="Refuse a checkpoint whose own template differs from ours.")
@click.option("--max-seq-len", default=None, type=int, help="Cut samples at this many tokens unless asked otherwise.")
@click.option("--use-rollout-routing-replay", "routing_replay", is_flag=True, help="Record the routed experts.")
@click.option("--use-rollout-indexer-replay", "indexer_replay", is_flag=True, help="Record the indexer's choices.")
@click.option("--incremental-replay", is_flag=True, help="Ask only for rows of experts that are not held yet.")
@click.option("--lora-path", default=None, metavar="NAME", help="LoRA adapter that every turn names to the engine.")
@click.option("--reject-control-tokens", is_flag=True, help="Refuse user and tool text that spells control tokens.")
@click.option(
    "--on-tools-change", type=click.Choice(["keep", "refuse"]), default="keep", show_default=True,
    help="When a session's tools change: keep the prefix and say so in its metadata, or refuse.",
)  # fmt: skip
@click.option(
    "--exact-weight-versions", is_flag=True,
    help="Answer streamed turns whole: only such answers say which weights sampled each token.",
)  # fmt: skip
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE FLAGS]...")
def command(
    engines: tuple[str, ...],
    history: str | None,
    use_session_server: str | None,
    options: tuple[str, ...],
    compat: str | None,
    **flags: Any,
) -> None:
    """Check the flags, start the engine if it is ours, serve until a signal."""
    with loading(), miles_names(flags) if compat else nullcontext():
        _serve(engines, history, use_session_server, options, flags)


@contextmanager
def loading() -> Iterator[None]:
    """Python does not look for cycles meanwhile: what is loaded stays, and it would walk over it again and again.

    The server turns that on again when all is loaded.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def miles_names(flags: dict[str, Any]) -> Iterator[None]:
    """--compat miles: its dotted defaults are our sample hooks, and its modules can be imported meanwhile."""
    from miles_core.rollout.compat import enabled, selector

    for name in ("pick_samples", "postprocess_samples"):
        flags[name] = selector("sample-hook", flags[name])
    with enabled() as real:
        if real is not None:
            click.echo(f"--compat miles: the real miles is installed ({real}) and used as it is", err=True)
        yield


def _serve(
    engines: tuple[str, ...],
    history: str | None,
    use_session_server: str | None,
    options: tuple[str, ...],
    flags: dict[str, Any],
) -> None:
    from miles_core.plugins import Registry
    from miles_core.plugins.families import resolve
    from miles_core.server.parts import load_parts
    from miles_core.server.run import serve
    from miles_core.server.settings import ServerSettings

    check_engine_flags(engines, options)
    flags["history"] = _history(history, use_session_server)
    checkpoint, model = flags.pop("checkpoint"), flags.pop("model")
    flags["checkpoint"] = checkpoint or model
    if flags["checkpoint"] is None:
        raise ConfigError("--checkpoint is missing: give the directory (or id) that holds the model's tokenizer")
    registry = Registry.discover()
    flags["tito_model"] = resolve(registry, flags["tito_model"], flags["checkpoint"])
    flags["chat_template_kwargs"] = template_kwargs(flags.pop("apply_chat_template_kwargs"))
    settings = ServerSettings(engine_urls=(), **flags)
    signal.signal(signal.SIGTERM, _interrupt)
    started = any("://" not in engine for engine in engines)
    # what is wrong with the family or a hook should not have to wait for an engine
    parts = load_parts(settings, registry) if started else None
    with ExitStack() as stack:
        urls = _engine_urls(engines, options, model or checkpoint, settings, registry, stack)
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn sends itself the signal again when it has shut down: end, and stop the engine on the way
            signal.signal(number, lambda *_: sys.exit(0))
        settings = replace(settings, engine_urls=urls)
        serve(settings, registry, lambda parts, url: write(start_block(settings, parts, url, engines)), parts)


def _interrupt(number: int, frame: object) -> None:
    """Stop as Ctrl-C does: a plugin that is starting an engine cannot take this for its own failure."""
    raise KeyboardInterrupt


def _history(history: str | None, older: str | None) -> str:
    chosen = {HISTORIES[value] for value in (history, older) if value is not None}
    if len(chosen) > 1:
        raise ConfigError(f"--history {history} and --use-session-server {older} contradict each other; give one")
    return chosen.pop() if chosen else "linear"


def _engine_urls(
    engines: tuple[str, ...],
    options: tuple[str, ...],
    model: str,
    settings: ServerSettings,
    registry: Registry,
    stack: ExitStack,
) -> tuple[str, ...]:
    """URLs as given, or those of the engine that is started by name and stopped with the server."""
    from miles_core.engine.base import EngineConfig
    from miles_core.engine.launch import launch

    names = [engine for engine in engines if "://" not in engine]
    for name in names:
        check_is_no_address(name)
    if not names:
        return engines
    if len(engines) > 1:
        raise ConfigError(f"--engine {' --engine '.join(engines)}: give URLs, or one engine's name")
    engine = launch(
        registry.load("engine", names[0]),
        EngineConfig(
            model=located(model), checkpoint=located(settings.checkpoint), tito_model=settings.tito_model,
            options=options, api_key=settings.engine_api_key, progress=lambda line: click.echo(line, err=True),
        ),
    )  # fmt: skip
    stack.callback(engine.close)
    return serving_urls(names[0], engine)


def _history_row(settings: ServerSettings) -> str:
    if settings.history == "tree":
        return f"tree, samples by {settings.pick_samples} and {settings.postprocess_samples}"
    return f"linear, at most {settings.max_rollback} generations rolled back"


def _how(bound: BoundFamily) -> str:
    return "best effort" if bound.family.best_effort else f"revision chosen: {bound.revision_chosen}"


def start_block(settings: ServerSettings, parts: Parts, url: str, engines: tuple[str, ...]) -> str:
    """What is running, for a person to check at a glance."""
    bound = parts.family
    engine = ", ".join(settings.engine_urls)
    if engines and "://" not in engines[0]:
        engine = f"{engines[0]} at {engine}"
    rows = {
        "model": settings.checkpoint,
        "family": f"{bound.name}@{bound.revision.name}, {_how(bound)}",
        "template": bound.template.source,
        "matcher": settings.message_matcher,
        "history": _history_row(settings),
        "engine": engine,
        "plugins": ", ".join(parts.plugins),
        **({"workers": f"{settings.workers} processes"} if settings.workers > 1 else {}),
        "url": url,
    }
    lines = [f"  {name:<9} {value}" for name, value in rows.items()]
    if bound.family.best_effort:
        lines.append("  note      family default follows the checkpoint's template and cannot prove it append-only;")
        lines.append("            name the model's family with --tito-model where there is one")
    return "\n".join(["miles-plugins session server", *lines])
