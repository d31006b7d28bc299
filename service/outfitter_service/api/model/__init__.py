"""The read model: the newest state of a cluster in memory, with a number for each change. It knows no bus, no HTTP."""
