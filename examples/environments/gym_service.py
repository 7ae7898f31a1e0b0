"""A resources server in small, in the manner of NeMo Gym: state by session cookie, tools as paths, a verifier.

    python examples/environments/gym_service.py --port 9100

| request | answer |
|---|---|
| `POST /seed_session` `{"expected": "49"}` | sets the cookie that names the session |
| `POST /calculator` `{"expression": "33 + 16"}` | `{"result": "49"}` |
| `POST /verify` `{"responses_create_params": {...}, "response": {...}}` | the same, with `reward` |

`response` has the form of OpenAI's Responses API: the verifier reads the text of its last output.
"""

from __future__ import annotations

import argparse
import ast
import operator
import re
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import uvicorn
from fastapi import Body, Cookie, FastAPI, HTTPException, Response

app = FastAPI()
sessions: dict[str, str] = {}
Session = Annotated[str | None, Cookie()]

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


@app.post("/seed_session")
async def seed_session(response: Response, expected: Annotated[str, Body(embed=True)]) -> dict[str, str]:
    """A session for one task."""
    name = uuid.uuid4().hex
    sessions[name] = expected
    response.set_cookie("session", name)
    return {}


@app.post("/calculator")
async def calculator(expression: Annotated[str, Body(embed=True)], session: Session = None) -> dict[str, str]:
    """The tool. What is wrong with an expression is its result, for the model to read."""
    task_of(session)
    try:
        return {"result": str(value(ast.parse(expression.strip(), mode="eval").body))}
    except (SyntaxError, ValueError) as error:
        return {"result": f"error: {error}"}


@app.post("/verify")
async def verify(body: Annotated[dict[str, Any], Body()], session: Session = None) -> dict[str, Any]:
    """Grade the last text, and end the session."""
    expected = task_of(session)
    texts = [
        part["text"]
        for item in body["response"]["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    ]
    answers = re.findall(r"The answer is (-?\d+)\.", texts[-1]) if texts else []
    sessions.pop(str(session))
    return {**body, "reward": float(answers[-1:] == [expected])}


def task_of(session: str | None) -> str:
    """What the session's answer should be, or 404."""
    if session not in sessions:
        raise HTTPException(404, "no session: POST /seed_session first, and send its cookie")
    return sessions[session]


def value(node: ast.expr) -> int:
    """The value of integers, + - * and brackets, of at most 64 bits."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return bounded(OPERATORS[type(node.op)](value(node.left), value(node.right)))
    raise ValueError("only integers with + - * and brackets")


def bounded(number: int) -> int:
    """The number itself, unless it is too large."""
    if number.bit_length() > 64:
        raise ValueError("the number is too large")
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=9100)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
