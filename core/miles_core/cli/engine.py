"""`miles-plugins engine`: start an engine by name and keep it running."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from miles_core.cli.flags import located
from miles_core.cli.output import claim_stdout, write
from miles_core.engine.base import Engine, EngineConfig
from miles_core.errors import ConfigError, EngineStartError

POLL = 0.5
"""Seconds between looks at whether the engine lives."""


@click.command(
    "engine",
    help="Start an engine, print its URLs, and run until Ctrl-C. Flags of the engine's own follow the others.",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--engine", "name", required=True, metavar="NAME", help="The engine plugin, such as local.")
@click.option("--model", metavar="DIR", help="The weights; --checkpoint by default.")
@click.option("--checkpoint", "--hf-checkpoint", metavar="DIR", help="The tokenizer; --model by default.")
@click.option("--tito-model", required=True, metavar="FAMILY[@REVISION]", help="The model family, or auto.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port; 0 takes a free one.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE FLAGS]...")
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    model: str | None,
    checkpoint: str | None,
    tito_model: str,
    host: str,
    port: int,
    options: tuple[str, ...],
) -> None:
    """Load the plugin, start the engine, wait for a signal or its end."""
    from miles_core.engine.launch import launch
    from miles_core.plugins import Registry
    from miles_core.plugins.families import resolve

    given = model or checkpoint
    if given is None:
        raise ConfigError("--model is missing: give the directory of the model that the engine shall serve")
    if "://" in name:
        raise ConfigError(f"--engine {name}: that one runs already; give the name of an engine to start, such as local")
    stdout = claim_stdout()
    registry, tokenizer = Registry.discover(), located(checkpoint or given)
    config = EngineConfig(
        model=located(given),
        checkpoint=tokenizer,
        tito_model=resolve(registry, tito_model, tokenizer),
        host=host,
        port=port,
        options=options,
        progress=lambda line: click.echo(line, err=True),
    )
    plugin = registry.load("engine", name)
    signal.signal(signal.SIGTERM, _interrupt)
    engine = launch(plugin, config)
    try:
        with _stop_signals() as stop:  # before the URL is out: whoever reads it may send one at once
            for url in engine.urls:
                write(url, stdout)
            if not engine.urls:
                click.echo(f"engine {name} is up, as part of one on several nodes; requests go to node 0", err=True)
            _watch(engine, name, stop)
    finally:
        engine.close()


def _watch(engine: Engine, name: str, stop: threading.Event) -> None:
    """Return when `stop` is set; raise if the engine ends before."""
    while not stop.wait(POLL):
        if not engine.alive():
            where = f" at {', '.join(engine.urls)}" if engine.urls else ""
            raise EngineStartError(f"engine {name}{where} ended by itself")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop as Ctrl-C does: a plugin that is starting an engine cannot take this for its own failure."""
    raise KeyboardInterrupt


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, in place of ending the process."""
    stop = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stop.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
