"""What offloading saves and costs, measured or read from compiled programs."""
