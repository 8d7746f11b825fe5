"""Benchmarks: commands that measure rowmesh beside its peers, in one run. See `benchmarks/README.md`."""
