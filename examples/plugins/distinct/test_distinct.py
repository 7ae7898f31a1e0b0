"""The conformance kit, and which of two goes."""

from acme_distinct import pick_samples

from miles_core import Sample
from miles_core.testing import conforms


def test_it_keeps_the_contract() -> None:
    conforms("sample-hook", "distinct")


def test_the_first_of_two_that_say_the_same_is_kept() -> None:
    leaves = [Sample(tokens=[1, 2], metadata={"leaf": {"node_id": node}}) for node in (3, 1)]
    other = Sample(tokens=[1, 3], metadata={"leaf": {"node_id": 2}})
    assert pick_samples([*leaves, other], {}) == [leaves[1], other]
