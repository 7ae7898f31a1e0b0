"""A sandbox service in small, in the manner of Harbor: one folder per sandbox, commands run in it, a script grades.

    python examples/environments/sandbox_service.py --port 9000

| request | answer |
|---|---|
| `POST /sandboxes` `{"files": {path: text}}` | `{"id"}` |
| `POST /sandboxes/ID/exec` `{"command": [...], "timeout": seconds}` | `{"exit_code", "stdout", "stderr"}` |
| `POST /sandboxes/ID/verify` | `{"reward"}`: runs `tests/test.sh`, which writes a number into `reward.txt` |
| `DELETE /sandboxes/ID` | 204 |

The folders have no isolation: real services run containers or virtual machines.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import Body, FastAPI, HTTPException

app = FastAPI()
sandboxes: dict[str, Path] = {}


@app.post("/sandboxes")
def create(files: Annotated[dict[str, str], Body(embed=True)]) -> dict[str, str]:
    """A sandbox with these files."""
    name, folder = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="sandbox-"))
    for path, text in files.items():
        target = (folder / path).resolve()
        if not target.is_relative_to(folder.resolve()):
            shutil.rmtree(folder)
            raise HTTPException(400, f"{path} leads out of the sandbox")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    sandboxes[name] = folder
    return {"id": name}


@app.post("/sandboxes/{name}/exec")
async def execute(
    name: str, command: Annotated[list[str], Body()], timeout: Annotated[float, Body()] = 10
) -> dict[str, object]:
    """Run a command in the sandbox's folder; one that takes too long is killed, with exit code 124."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder_of(name), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout)
    except TimeoutError:
        process.kill()
        await process.wait()
        return {"exit_code": 124, "stdout": "", "stderr": f"longer than {timeout:g} s"}
    return {"exit_code": process.returncode, "stdout": out.decode(), "stderr": err.decode()}


@app.post("/sandboxes/{name}/verify")
async def verify(name: str) -> dict[str, float]:
    """Grade what is in the sandbox."""
    done = await execute(name, ["sh", "tests/test.sh"])
    reward = folder_of(name) / "reward.txt"
    if not reward.exists():
        raise HTTPException(500, f"tests/test.sh wrote no reward.txt: {done['stderr']}")
    return {"reward": float(reward.read_text())}


@app.delete("/sandboxes/{name}", status_code=204)
async def delete(name: str) -> None:
    """Throw the sandbox away."""
    shutil.rmtree(folder_of(name), ignore_errors=True)
    del sandboxes[name]


def folder_of(name: str) -> Path:
    """The sandbox's folder, or 404."""
    if name not in sandboxes:
        raise HTTPException(404, f"no sandbox {name}")
    return sandboxes[name]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=9000)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
