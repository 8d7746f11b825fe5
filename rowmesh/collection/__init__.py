"""An EmbeddingCollection at work: rows become vectors, gradients become steps."""
