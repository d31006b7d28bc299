"""The read API: what a cluster's topics say, over HTTP. It needs no manager and writes nothing.

`follower.py` reads the topics into the model (`model/`), `routes.py` answers from it, and `typed.py` turns a route into
its HTTP and into its part of the OpenAPI document.
"""
