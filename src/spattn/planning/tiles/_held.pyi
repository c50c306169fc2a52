"""Nothing of it is called by Python; _held.pyx documents it."""
