#!/bin/sh
# Checks this machine's GPUs without a network: installs the wheels of `make gpu-wheels` into a scratch folder, if they
# are there, else takes the checkout's own environment. Its first argument is the Python to use; others are the check's.
set -eu
cd "$(dirname "$0")/../.."
base=$1
shift
python=.venv/bin/python
if [ -d build/gpu-wheels ]; then
	scratch=$(mktemp -d)
	trap 'rm -rf "$scratch"' EXIT
	"$base" -m venv "$scratch"
	python=$scratch/bin/python
	"$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links build/gpu-wheels \
		'outfitter[service,nvidia]'
fi
PYTHONPATH=tests "$python" -m gpu "$@"
