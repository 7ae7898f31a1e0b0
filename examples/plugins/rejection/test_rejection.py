"""The conformance kit runs it against a session server that answers from a script."""

from miles_core.testing import GeneratorTrial, conforms
from miles_core.testing.fake_sessions import say


def test_it_keeps_the_contract() -> None:
    report = conforms("generator", "rejection", trial=GeneratorTrial(answers=[say("It is 3.")]))
    assert {check.outcome.value for check in report.checks} == {"pass"}
