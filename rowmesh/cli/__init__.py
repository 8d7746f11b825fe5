"""The command line: `rowmesh data | plan | train | checkpoint | evaluate | …`, a file each."""
