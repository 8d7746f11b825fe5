"""Ids of dynamic tables become frames: batches ask, owners decide, ranks agree."""
