"""The machine and the installation: what is there, what is set up badly, how C programs link to vram."""
