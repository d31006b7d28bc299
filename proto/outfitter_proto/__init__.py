"""The wire: what managers, workers and operators say to each other, and the bus that carries it.

Everything another process can see is defined here: records, names, keys, partitioning, the bus port. It
knows no rules of allocation and does no work of its own.
"""

__version__ = "0.1.0"
