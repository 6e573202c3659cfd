"""Explicit SIMD for the numba backend: LLVM vector IR through numba intrinsics, no compiler and no build step."""
