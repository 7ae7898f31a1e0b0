"""The session server: a thin FastAPI adapter over `miles_core.session`."""

import os

# pydantic reads the entry points of everything installed when its first model is made, and ends the process at a
# distribution whose metadata it cannot read; nothing here wants its plugins
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
