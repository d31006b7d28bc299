"""`python -m outfitter_service.cli`: the command line in this interpreter, independent of PATH."""

from outfitter_service.cli import main

main()
