"""Support that every part of rowmesh uses: faults, files, memory, threads, words for messages."""
