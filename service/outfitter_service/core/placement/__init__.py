"""Which devices a request gets, also where several resources show the same device."""
