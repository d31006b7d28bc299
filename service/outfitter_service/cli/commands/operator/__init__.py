"""Commands of operators: what they order of managers."""
