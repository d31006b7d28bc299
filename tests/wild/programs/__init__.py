"""What the workers of the crash matrix run. The files are copied beside `uses.py` into the folder of each cell."""
