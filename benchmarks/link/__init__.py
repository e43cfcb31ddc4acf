"""How well the link between device and host is used."""
