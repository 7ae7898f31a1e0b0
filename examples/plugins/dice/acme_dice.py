"""An engine without a model: every token is as likely as any other, and its log-probability is the true one.

For load tests of agents and session servers, and for pipelines without a GPU. Turns end by chance too, with the stop
token. It is served by a thread of the program that starts it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from miles_core import Engine, EngineConfig, hookimpl
from miles_core.errors import EngineStartError
from miles_core.tito import Tokenizer, load_tokenizer


@hookimpl
def launch_engine(config: EngineConfig) -> Engine:
    """Read the tokenizer, and serve."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--stop-token", default="<|im_end|>")
    parser.add_argument("--length", type=float, default=16.0)
    options, unknown = parser.parse_known_args(config.options)
    if unknown:
        raise EngineStartError(f"engine dice has no flag {unknown[0]}; it has --stop-token and --length")
    tokenizer = load_tokenizer(config.checkpoint)
    (stop,) = tokenizer.ids_of([options.stop_token], needed_by="engine dice")
    return DiceEngine(Dice(tokenizer, stop, options.length), config.host, config.port)


class Dice:
    """Samples answers: `length` tokens on average, none of them special but the last."""

    def __init__(self, tokenizer: Tokenizer, stop: int, length: float) -> None:
        self._tokenizer = tokenizer
        self._stop, self._length = stop, length
        added = set(tokenizer.added_tokens.values())
        self._sides = [i for i in range(tokenizer.vocab_size) if i not in added and tokenizer.id_to_token(i)]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """A chat answer as SGLang gives it."""
        chance = random.Random(request.get("seed"))
        ids, log_probs = self._roll(chance, int(request.get("max_tokens") or 64))
        finish = "stop" if ids[-1] == self._stop else "length"
        text = self._tokenizer.decode([token for token in ids if token != self._stop])
        prompt = len(request.get("input_ids") or [])
        meta = {
            "id": request.get("rid"),
            "finish_reason": {"type": finish},
            "prompt_tokens": prompt,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "dice",
            "output_token_logprobs": [[p, token, None] for p, token in zip(log_probs, ids, strict=True)],
        }
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish, "meta_info": meta}
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)}
        head = {"id": "dice", "object": "chat.completion", "created": 0, "model": "dice"}
        return {**head, "choices": [choice], "usage": usage}

    def _roll(self, chance: random.Random, most: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        log_probs: list[float] = []
        stops = 1 / self._length
        while len(ids) < most and self._stop not in ids[-1:]:
            stop = chance.random() < stops
            ids.append(self._stop if stop else chance.choice(self._sides))
            log_probs.append(math.log(stops if stop else (1 - stops) / len(self._sides)))
        return ids, log_probs


class DiceEngine:
    """Serves until it is closed."""

    def __init__(self, dice: Dice, host: str, port: int) -> None:
        handler = type("Handler", (_Handler,), {"dice": dice})
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def urls(self) -> tuple[str, ...]:
        """Where it answers."""
        host, port = self._server.server_address[:2]
        return (f"http://{host!s}:{port}",)

    def alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving; may be called twice."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    dice: Dice
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({"model_path": "dice", "weight_version": "dice"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        self._send(self.dice.answer(body) if self.path == "/v1/chat/completions" else {})

    def _send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the program's own output stands there."""
