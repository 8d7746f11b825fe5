"""The command line: `rowmesh data | train | evaluate | env`."""
