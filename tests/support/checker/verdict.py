"""What the independent checker says of a bus that a test has used."""

from __future__ import annotations

import anyio.to_thread

from outfitter_verify import Report, verify


async def verdict(url: str, cluster: str = "outfitter") -> Report:
    """The checker's report on all that is committed on `url` now."""
    return await anyio.to_thread.run_sync(lambda: verify(url, cluster))
