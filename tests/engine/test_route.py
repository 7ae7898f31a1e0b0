"""The choice of a worker: by load, then by rank, never one that is to be left, and back to one that is well again."""

from __future__ import annotations

from collections import Counter

import pytest

from miles_core.engine.route import RETRY_AFTER_SECONDS, Router
from miles_core.errors import ConfigError, Overloaded

URLS = ("http://a", "http://b", "http://c")


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_sessions_go_to_the_least_loaded() -> None:
    router = Router(URLS)
    for number in range(9):
        router.enter(router.choose(f"s{number}"))
    assert [worker.sessions for worker in router.workers] == [3, 3, 3]
    router.leave("http://b")
    assert router.choose("another") == "http://b"


def test_ties_are_broken_by_the_session_alone() -> None:
    chosen = [Router(URLS).choose(f"s{number}") for number in range(300)]
    assert chosen == [Router(URLS[::-1]).choose(f"s{number}") for number in range(300)]
    assert min(Counter(chosen).values()) > 60


def test_a_worker_that_failed_is_passed_over_for_a_while() -> None:
    clock = Clock()
    router = Router(URLS[:2], clock=clock)
    router.failed("http://a", "it broke")
    assert {router.choose(f"s{number}") for number in range(20)} == {"http://b"}
    clock.now += RETRY_AFTER_SECONDS
    assert {router.choose(f"s{number}") for number in range(20)} == {"http://a", "http://b"}
    assert router.workers[0].last_error == "it broke"


def test_an_unhealthy_worker_is_left_until_it_is_well() -> None:
    router = Router(URLS[:2])
    assert router.unwell("http://a", "no answer")
    assert not router.unwell("http://a", "no answer"), "no news"
    assert not router.keeps("http://a")
    assert router.choose("s") == "http://b"
    router.unwell("http://b", "no answer")
    assert router.keeps("http://a"), "no other would be better"
    router.recovered("http://a")
    assert {router.choose(f"s{number}") for number in range(20)} == {"http://a"}
    assert router.keeps("http://a")
    assert not router.keeps("http://b")


def test_a_draining_worker_takes_nobody() -> None:
    router = Router(URLS[:2])
    router.add("http://a").draining = True
    assert {router.choose(f"s{number}") for number in range(20)} == {"http://b"}
    assert not router.keeps("http://a")
    router.unwell("http://b", "no answer")
    assert router.keeps("http://a"), "its sessions stay as long as nobody else serves"
    assert router.choose("new") == "http://b", "a new one still does not come"
    router.add("http://b").draining = True
    with pytest.raises(Overloaded, match=r"all 2 are draining; add one \(/admin/engines\)") as caught:
        router.choose("new")
    assert (caught.value.status, caught.value.retry_after) == (503, 5)


def test_a_removed_worker_is_gone_and_its_turns_count_down() -> None:
    router = Router(URLS[:2])
    with router.running("http://a"):
        removed = router.remove("http://a")
        assert removed is not None
        assert removed.in_flight == 1
        assert not router.keeps("http://a")
    assert removed.in_flight == 0
    router.failed("http://a", "gone")
    router.enter("http://a")
    with router.running("http://a"):
        assert [worker.in_flight for worker in router.workers] == [0]


def test_no_engine_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="no engine URL given"):
        Router(())
    assert [worker.url for worker in Router(("http://a/", "http://a")).workers] == ["http://a"]
