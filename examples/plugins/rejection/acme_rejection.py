"""A generate function that tries until the label is in the answer, each time in a session of its own."""

from __future__ import annotations

import argparse
from typing import Any

import aiohttp

from miles_core import GenerateFnInput, GenerateFnOutput, Sample
from miles_core.session import wire

NAMES = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_new_tokens": "max_tokens"}


class Rejection:
    """Called once per sample; what the class takes from a run is in its flags."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """How often to try."""
        parser.add_argument("--attempts", type=int, default=3, help="Most tries for a sample.")

    async def __call__(self, input: GenerateFnInput) -> GenerateFnOutput:
        """The first right sample, else the last."""
        async with aiohttp.ClientSession(headers=_headers(input.args)) as http:
            for attempt in range(1, input.args.attempts + 1):
                sample = await _attempt(http, input)
                sample.metadata["attempts"] = attempt
                sample.reward = float(str(sample.label) in sample.response)
                if sample.reward:
                    break
        return GenerateFnOutput(sample)


def _headers(args: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {args.session_api_key}"} if args.session_api_key else {}


async def _attempt(http: aiohttp.ClientSession, input: GenerateFnInput) -> Sample:
    """One session of one turn, as a sample."""
    sessions = f"{input.args.session_server_url}/sessions"
    async with http.post(sessions, json={}, raise_for_status=True) as response:
        session = f"{sessions}/{(await response.json())['session_id']}"
    try:
        prompt = input.sample.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        sampling = {NAMES[key]: value for key, value in input.sampling_params.items() if key in NAMES}
        body = {"model": "default", "messages": messages, **sampling}
        async with http.post(f"{session}/v1/chat/completions", json=body, raise_for_status=True):
            pass
        async with http.post(f"{session}/samples", json={}, raise_for_status=True) as response:
            reply = wire.decode(await response.read())
        return wire.apply(reply, input.sample, merge_session_metadata=True)[0]
    finally:
        async with http.delete(session):
            pass
