"""Whoever runs a session server: its admin API and its metrics."""

from __future__ import annotations

import json
import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from helpers.sessions import Answer, request

ADMIN_KEY = "admin-key"


class Operator:
    """Talks to the operator's side of a server."""

    def __init__(self, url: str, key: str = ADMIN_KEY) -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}"}

    def ask(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None) -> Answer:
        """A request below `/admin/`."""
        return request(f"{self.url}/admin/{path}", method, body, raw=raw, headers=self.headers)

    def add(self, url: str, **fields: Any) -> dict[str, Any]:
        """Add an engine, or change it; as it is now."""
        answer = self.ask("POST", "engines", {"url": url, **fields})
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json["engine"]
        return found

    def engines(self) -> dict[str, dict[str, Any]]:
        """The engines by URL."""
        answer = self.ask("GET", "engines")
        assert answer.status == 200, answer.body
        return {row["url"]: row for row in answer.json["engines"]}

    def until(self, url: str, seconds: float = 30, **wanted: Any) -> dict[str, Any]:
        """The engine, once it is as wanted."""
        deadline = time.monotonic() + seconds
        while any((row := self.engines()[url])[key] != value for key, value in wanted.items()):
            assert time.monotonic() < deadline, row
        return row

    def metrics(self) -> dict[str, float]:
        """Every value of `/metrics` by `name{label=value,…}`, the process left out and summed over."""
        answer = request(f"{self.url}/metrics", headers=self.headers)
        assert answer.status == 200, answer.body
        assert answer.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.body.decode()):
            assert family.documentation
            assert family.type in ("counter", "gauge", "histogram")
            for sample in family.samples:
                labels = {key: value for key, value in sample.labels.items() if key != "process"}
                assert sample.labels["process"].isdigit()
                spelled = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
                name = f"{sample.name}{{{spelled}}}" if labels else sample.name
                found[name] = found.get(name, 0.0) + sample.value
        return found

    def turns(self) -> dict[str, int]:
        """Turns by outcome, those that there were."""
        start = "miles_turns_total{outcome="
        return {
            key[len(start) : -1]: int(value) for key, value in self.metrics().items() if key.startswith(start) and value
        }


def shown(value: Any) -> str:
    """JSON, for an assertion's text."""
    return json.dumps(value, indent=1)
