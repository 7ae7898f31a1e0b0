"""A matcher plugin's hooks as the session calls them: what they do wrong is theirs, and never a decision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

from miles_core.errors import MilesError, PluginContractError
from miles_core.plugins import Plugin
from miles_core.session.body import short
from miles_core.session.policy import Matcher, MessageKey
from miles_core.types import Message


def guarded_matcher(plugin: Plugin) -> Matcher:
    """The matcher's function; anything but a bool from it is a PluginContractError, never a decision."""
    call = _guarded(plugin, "message_matches")

    def matches(stored: Message, replayed: Message) -> bool:
        answer = call(stored, replayed)
        if answer is True or answer is False:
            return bool(answer)
        if inspect.iscoroutine(answer):
            answer.close()
        raise PluginContractError(
            f"{plugin.describe()}: message_matches returned {short(answer)} ({type(answer).__name__}), "
            "expected True or False"
        )

    return matches


def guarded_key(plugin: Plugin) -> MessageKey | None:
    """The matcher's keys, if it gives any; one that cannot be looked up is a PluginContractError."""
    if not plugin.has("message_key"):
        return None
    call = _guarded(plugin, "message_key")

    def key(message: Message) -> Hashable:
        found: Hashable = call(message)
        try:
            hash(found)
        except TypeError as error:
            raise PluginContractError(
                f"{plugin.describe()}: message_key returned {short(found)} ({type(found).__name__}), "
                "which cannot be looked up; return a tuple of strings"
            ) from error
        return found

    return key


def _guarded(plugin: Plugin, hook: str) -> Callable[..., Any]:
    """The hook, called for every message of a conversation; what it raises is a PluginContractError.

    Errors of ours that it raises are its fault all the same.
    """
    function = plugin.hook(hook)

    def call(*messages: Message) -> Any:
        try:
            return function(*messages)
        except MilesError as error:
            raise PluginContractError(
                f"{plugin.describe()} failed in {hook}: {type(error).__name__}: {error.message}"
            ) from error
        except (Exception, SystemExit) as error:
            with plugin.guard(hook):
                raise error

    return call
