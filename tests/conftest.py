"""A skipped test fails the run where `CI` is set: there, everything is installed. Tests with SGLang share a process."""

from __future__ import annotations

import os
from typing import Any

import pytest


class NoSkips:
    """Collects skipped tests, on the main process only, and turns the run red if there are any."""

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # An expected failure is reported as skipped too, and is none.
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped[report.nodeid] = reason_of(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped[report.nodeid] = reason_of(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped tests fail the run, because CI is set")
            for nodeid, reason in sorted(self.skipped.items()):
                terminalreporter.line(f"{nodeid}: {reason}")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why the test was skipped, as its author wrote it."""
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The usual one, but that the first process gets all tests with SGLang at once: there is to be one SGLang."""
    from xdist.scheduler import LoadScheduling

    if config.getvalue("dist") != "load":
        return None
    scheduling: Any = LoadScheduling(config, log)
    send_usual = scheduling._send_tests

    def send(node: Any, num: int) -> None:
        names = scheduling.collection
        together = [at for at in scheduling.pending if names[at].startswith("tests/real_sglang/")]
        if not together:
            send_usual(node, num)
            return
        scheduling.pending[:] = sorted(set(scheduling.pending).difference(together))
        scheduling.node2pending[node].extend(together)
        node.send_runtest_some(together)

    scheduling._send_tests = send
    return scheduling


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist pass their reports on to the main process, which is the one that decides.
    if os.environ.get("CI") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NoSkips(), "no-skips")
