"""Whether what is kept in few bits still trains as well."""
