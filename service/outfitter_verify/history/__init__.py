"""Checks of the history: it has each step of the ledger, and a replay gives the ledger."""
