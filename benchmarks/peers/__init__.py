"""What users would run instead of rowmesh, on the same work. Run by the Python of the peer's own environment."""
