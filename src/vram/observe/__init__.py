"""Watching a running program: recordings, annotations, measurements, monitors and metrics."""
