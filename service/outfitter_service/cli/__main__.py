"""`python -m outfitter_service.cli`: the command line of this very interpreter, whatever PATH says."""

from outfitter_service.cli import main

main()
