"""The built-in model families, one module each."""
