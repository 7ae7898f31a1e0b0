"""The conformance kit starts the engine on a small tokenizer, and takes a turn."""

from pathlib import Path

from miles_core import EngineConfig
from miles_core.testing import EngineTrial, conforms, fake_tokenizer


def test_it_keeps_the_contract(tmp_path: Path) -> None:
    family = fake_tokenizer.chatml().family
    checkpoint = str(fake_tokenizer.write_checkpoint(tmp_path, family))
    config = EngineConfig(model=checkpoint, checkpoint=checkpoint, tito_model="default")
    report = conforms("engine", "dice", trial=EngineTrial(config=config))
    assert {check.name for check in report.checks if check.outcome == "skip"} == {"configures SGLang"}
