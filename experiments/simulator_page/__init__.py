"""The simulator as one HTML file: a port of the engine, and its page."""
