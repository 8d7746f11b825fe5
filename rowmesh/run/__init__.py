"""Training: configuration, the loop, evaluation and their metrics."""
