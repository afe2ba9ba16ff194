"""The machine and the installation: inventory, configuration problems, flags for C programs."""
