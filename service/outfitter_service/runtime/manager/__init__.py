"""One manager process: its service, a member of the managers' group, and the server of one partition."""
