"""Import what a record names, and say where it went wrong.

Whatever an import raises becomes a PluginLoadError, SystemExit included; KeyboardInterrupt alone passes. The
messages of these errors go on a sentence that the registry starts with the plugin's name.
"""

from __future__ import annotations

import os
import traceback
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from miles_core.errors import PluginLoadError
from miles_core.plugins.records import PluginRecord
from miles_core.plugins.wording import meant

LONGEST_TEXT = 1000
"""Characters of an exception's text that messages have."""
COMPAT = "install miles, or let miles-plugins rollout or serve stand in for it with --compat miles"
"""What helps where the module `miles` is missing."""


def import_target(record: PluginRecord) -> tuple[ModuleType, object]:
    """The module and the object that `record` names (the same one if it names a module).

    A module may put another object in its place (`sys.modules[__name__] = …`): that is then the object.
    """
    if not record.distribution:
        return _import_dotted(record.target)
    name, _, attribute = record.target.partition(":")
    module = _import(name, record)
    if module is None:
        advice = f"is {record.distribution} installed whole? reinstall it, or tell its author"
        raise PluginLoadError(f"cannot be imported: there is no module {name!r}\n  {advice}")
    return _as_module(module, name), _attribute(module, name, attribute.split(".") if attribute else [])


def _as_module(found: object, name: str) -> ModuleType:
    return found if isinstance(found, ModuleType) else ModuleType(name)


def _import_dotted(path: str) -> tuple[ModuleType, object]:
    """Import the longest prefix of `path` that is a module; the rest are attributes."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        module = _import(name, None)
        if module is not None:
            return _as_module(module, name), _attribute(module, name, parts[length:])
    advice = f"is its directory on PYTHONPATH? the current one is {os.getcwd()}"
    raise PluginLoadError(
        f"cannot be imported: there is no module {parts[0]!r}\n  {COMPAT if parts[0] == 'miles' else advice}"
    )


def _import(name: str, record: PluginRecord | None) -> object | None:
    """Import one module; None if it does not exist, as opposed to failing in what it imports itself."""
    try:
        return import_module(name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        _refuse(error, name, _missing(error, record))
    except BaseException as error:
        _refuse(error, name, _advice(error))


def _refuse(error: BaseException, module: str, advice: str) -> NoReturn:
    raise PluginLoadError(f"cannot be imported: {said(error, module)}\n  {advice}") from error


def _missing(error: ModuleNotFoundError, record: PluginRecord | None) -> str:
    if record is not None and record.extras:
        return f"install what it needs: pip install '{record.distribution}[{','.join(record.extras)}]'"
    if (error.name or "").partition(".")[0] == "miles":
        return COMPAT
    return f"install what provides {error.name or 'it'}, or tell its author"


def _advice(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "a plugin must not exit when it is imported; tell its author"
    return "mend it there, or tell its author"


def said(error: BaseException, module: str = "") -> str:
    """Type, text and place of an exception: `ValueError: no key (/x/acme.py, line 3)`.

    The place is the innermost line of the package that `module` is in, else the innermost of all but ours.
    """
    text = f"{type(error).__name__}: {_text(error)}".rstrip(": ")
    if isinstance(error, SyntaxError):  # its text has the place already
        return text
    places = [
        (str(frame.f_globals.get("__name__", "")).partition(".")[0], frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    outside = [place for place in places if place[0] not in ("importlib", "miles_core")]
    own = [place for place in outside if place[0] == module.partition(".")[0]] or outside
    return f"{text} ({own[-1][1]}, line {own[-1][2]})" if own else text


def _text(error: BaseException) -> str:
    """One line of the exception's text, of bounded length; a plugin's own exception may fail even at that."""
    try:
        text = " ".join(str(error).split())
    except (Exception, SystemExit):
        return ""
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _attribute(module: object, module_name: str, names: list[str]) -> object:
    value, path = module, module_name
    for name in names:
        try:
            value = getattr(value, name)
        except KeyboardInterrupt:
            raise
        except AttributeError as error:
            close = meant(name, (known for known in dir(value) if not known.startswith("_")))
            file = getattr(module, "__file__", None)
            advice = f"did you mean {close}?" if close else f"look into {file or path}"
            raise PluginLoadError(f"cannot be loaded: {path} has no attribute {name!r}\n  {advice}") from error
        except BaseException as error:
            _refuse(error, module_name, _advice(error))
        path = f"{path}.{name}"
    return value
