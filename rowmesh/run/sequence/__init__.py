"""Training and evaluation of sequence models over several ranks."""
