"""Small helpers that know nothing of the wire's records but processes' owners."""
