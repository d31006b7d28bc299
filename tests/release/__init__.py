"""What `make dist` makes and checks: a wheel, an sdist and an SBOM of the last commit. No test of the product."""
