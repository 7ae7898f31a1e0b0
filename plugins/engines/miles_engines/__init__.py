"""Engine plugins: what runs the model behind the session server."""
