"""Memory with a known lifetime: arenas, growable buffers, scratch memory, and plans made ahead of a run."""
