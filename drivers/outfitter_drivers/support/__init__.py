"""Shared by several drivers; not for third parties."""
