"""CUDA kernels of shared-prefix decode attention, and the tables that say what each launch does."""
