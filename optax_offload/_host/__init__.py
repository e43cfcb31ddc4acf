"""The host: how much memory it lends, and the link to it."""
