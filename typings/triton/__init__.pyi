# Triton types kernels as its compiler sees them; pyright takes that for the values that they compute.
from typing import Any

def __getattr__(name: str) -> Any: ...
