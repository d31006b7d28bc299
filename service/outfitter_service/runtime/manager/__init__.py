"""One manager process: the host-scope service, a cluster member, and the server of one partition."""
