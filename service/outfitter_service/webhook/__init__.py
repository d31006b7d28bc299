"""The mutating admission webhook of Kubernetes: pods that ask by annotation get their requests and limits."""
