"""An update, slice by slice: what is on the device together, and in which order."""
