"""Engines: starting them, and talking to them over SGLang's HTTP protocol."""
