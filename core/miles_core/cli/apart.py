"""Work on plugins in a child process, so that nothing a plugin does can end the command or keep it from ending.

An import may call `os._exit`, crash the interpreter, wait for input, or start threads that never end. The child does
the work item by item and sends each result; where it is gone before its time, the item it was at is to blame, and
another child goes on with the next.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from typing import Any, NoReturn, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

PATIENCE = 10.0
"""Seconds after which it is said on stderr what is still being worked on."""

EXIT_PATIENCE = 2.0
"""Seconds that what plugins registered with `atexit` may take."""

_INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Died:
    """The process ended while it worked on an item; `how` says in what way."""

    how: str


def apart(
    items: Sequence[Item], work: Callable[[Item], Result], told: Callable[[Item], str]
) -> Iterator[Result | Died]:
    """The result of `work` for each item, or how it ended the process. Results travel as pickles.

    `told` names an item for the message that it takes long. Raises KeyboardInterrupt if `work` did.
    """
    done = 0
    while done < len(items):
        child, results = _start(items[done:], work)
        try:
            for _ in range(done, len(items)):
                answer = _next(results, f"still at {told(items[done])}")
                if answer is None:
                    yield Died(_how(_wait(child)))
                    done += 1
                    break
                if answer == _INTERRUPTED:
                    raise KeyboardInterrupt
                yield answer[0]
                done += 1
        finally:
            results.close()
            _end(child)


def _start(items: Sequence[Item], work: Callable[[Item], Result]) -> tuple[int, BufferedReader]:
    """A child that works, and where its results come from."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(writer)
        return child, open(reader, "rb")
    os.close(reader)
    try:
        with open(writer, "wb") as results:
            _serve(items, work, results)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)  # whatever happened: this process must not go on as the command


def _serve(items: Sequence[Item], work: Callable[[Item], Result], results: BufferedWriter) -> NoReturn:
    """The child's whole life."""
    with open(os.devnull) as nothing:  # a plugin that asks for input gets none, in place of waiting for it
        os.dup2(nothing.fileno(), 0)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (open until the process ends)
    try:
        for item in items:
            pickle.dump((work(item),), results)
            results.flush()
    except KeyboardInterrupt:
        pickle.dump(_INTERRUPTED, results)
    results.close()
    leave(0)


def leave(status: int) -> NoReturn:
    """End the process with this status, though a plugin's threads, or what it registered to run at exit, may not end.

    `sys.exit` waits for every thread that is no daemon. What is registered with `atexit` still runs, for a while.
    """
    # the private name is the only way to run what is registered without waiting for threads first
    import atexit

    sys.excepthook = sys.__excepthook__  # a plugin may have taken it away, and no thread starts without
    runs = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    runs.start()
    runs.join(EXIT_PATIENCE)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


def _next(results: BufferedReader, late: str) -> Any:
    """The next result; None if there will be none. After a while it is said what is waited for."""
    timer = threading.Timer(PATIENCE, lambda: print(late, "...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        return pickle.load(results)
    except (EOFError, pickle.UnpicklingError):
        return None
    finally:
        timer.cancel()
        timer.join()  # no thread of ours may be alive when the next child is forked


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _how(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"killed the process with {signal.Signals(-code).name}"
    return f"ended the process with exit code {abs(code)}"


def _end(child: int) -> None:
    """See a child off that has nothing more to say: its exit handlers have their time, and no more."""
    deadline = time.monotonic() + EXIT_PATIENCE + 1
    with suppress(ChildProcessError):  # it was waited for already
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
