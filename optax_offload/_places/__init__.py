"""Where leaves belong: rules, memory kinds, shardings, layouts and templates."""
