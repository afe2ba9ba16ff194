"""Devices, streams and graphs; pools, buffers and their statistics; what an out-of-memory error says."""
