"""What several drivers share and third parties do not import."""
