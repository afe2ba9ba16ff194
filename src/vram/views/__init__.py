"""Where other tools show what vram knows: IPython and pytest."""
