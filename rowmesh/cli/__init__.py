"""The command line: `rowmesh data | plan | train | evaluate | export | env | doctor`."""
