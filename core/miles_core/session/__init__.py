"""Session state: histories, tokens and samples. Knows no HTTP, clock or network."""
