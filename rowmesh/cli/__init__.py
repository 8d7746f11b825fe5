"""The command line: `rowmesh data | plan | train | evaluate | env`."""
