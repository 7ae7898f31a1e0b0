"""Tools for testing plugins: import what you need from the modules in here; nothing loads by itself."""
