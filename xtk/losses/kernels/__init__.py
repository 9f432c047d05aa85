"""Kernels of losses: numba and Triton, and the chunked softmax that calls them."""
