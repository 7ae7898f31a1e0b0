"""The built-in sample hooks of tree histories, one module each."""
