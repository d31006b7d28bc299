"""Processes that workers leave behind: finding them, ending them, and waiting until they are gone."""
