"""The conformance kit, which sees two turns."""

from miles_core.testing import AgentTrial, conforms
from miles_core.testing.fake_sessions import say


def test_it_keeps_the_contract() -> None:
    answers = [say("It is 4.", reasoning="Hm."), say("It is 3.")]
    report = conforms("agent", "double_check", trial=AgentTrial(answers=answers))
    assert {check.name for check in report.checks if check.outcome == "skip"} == {
        "can be stopped",
        "registers its flags",
    }
