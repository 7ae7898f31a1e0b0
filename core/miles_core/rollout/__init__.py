"""Run prompts through a generate function, and keep what comes out.

`data` reads prompts, `loader` binds a generate function, `runner` runs it concurrently, `output` writes each
finished sample durably and resumes, `summary` adds everything up. Nothing here starts an engine or a server:
the command line does, and hands over their addresses in `state.RolloutArgs`.
"""

from __future__ import annotations
