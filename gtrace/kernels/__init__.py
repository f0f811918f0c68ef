"""gtrace.kernels."""
