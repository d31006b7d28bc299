"""Commands for whoever runs managers and their topics."""
