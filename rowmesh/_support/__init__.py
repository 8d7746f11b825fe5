"""What every part of rowmesh uses and none is about: faults, files, memory, threads, words for messages."""
