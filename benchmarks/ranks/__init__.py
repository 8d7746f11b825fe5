"""What the ranks of rowmesh run while a benchmark measures them."""
