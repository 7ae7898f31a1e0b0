"""The session server: a thin FastAPI adapter over `miles_core.session`."""
