"""Other ways to place rows, to compare with: OPER's own solvers, exact ones, and what other libraries do.

No run needs them unless its configuration names one (`placement.strategy`).
"""
