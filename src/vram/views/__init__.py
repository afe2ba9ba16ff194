"""Integration with other tools: IPython and pytest."""
