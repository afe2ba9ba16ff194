"""What the plugs into CuPy, Numba, cuda.core, Dask and PyTorch share."""
