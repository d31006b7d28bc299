"""Clusters of other systems, as processes of this machine: for what workers of these systems do with Outfitter."""
