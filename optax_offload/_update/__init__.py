"""An update, or a whole step: trace, schedule, run."""
