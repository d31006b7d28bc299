"""The failure detector: leases of workers and the deaths of watched processes."""
