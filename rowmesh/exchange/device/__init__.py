"""Rows in the memory of GPUs, and how they travel: what this package's parent is for a CPU. Begin with `backend`."""
