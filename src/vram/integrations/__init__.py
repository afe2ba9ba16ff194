"""Code shared by the adaptors for CuPy, Numba, cuda.core, Dask and PyTorch."""
