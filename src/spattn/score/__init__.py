"""Score functions: traced once, differentiated by rule."""
