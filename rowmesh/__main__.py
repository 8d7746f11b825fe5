"""`python -m rowmesh` is `rowmesh`."""

from rowmesh.cli.__main__ import main

if __name__ == "__main__":
    main()
