"""The built-in message matchers, one module each."""
