"""`make wild`: the crash matrix. Each integration meets each crash, and the using processes say who has what."""
