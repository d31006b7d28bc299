"""Checks of what workers publish: each registration is answered, and devices are lent again only after a release."""
