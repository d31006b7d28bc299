"""The wire between managers, workers and operators, and the bus that carries it.

This package defines everything that other processes can see: records, names, keys, partitioning, the bus port. It has
no rules of allocation.
"""

__version__ = "0.2.0"
