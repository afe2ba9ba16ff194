"""Memory with a known lifetime: arenas, growable buffers, scratch memory, and plans for a run."""
