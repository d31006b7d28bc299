"""What a seed makes of its world: hosts, managers and workers, and the faults that come over them."""
