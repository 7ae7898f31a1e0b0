"""Run prompts through a generate function, and keep what comes out.

`data` and `tables` read prompts, `loader` binds a generate function, `runner` runs it concurrently, with `rewards` and
`groups`; `output` writes each finished sample durably and resumes, `summary` adds everything up. `stream` is all of it
as a library, `trainers` hands samples on. `generation` and `engines` are what generate functions call engines with,
`compat` what modules written for miles import. Nothing here starts an engine or a server: the command line does, and
hands over their addresses in `state.RolloutState`.
"""

from __future__ import annotations
