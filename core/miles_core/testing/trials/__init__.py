"""Trying plugins out: a task, a run against fakes, and a look at what came of it."""
