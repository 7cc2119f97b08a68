"""The optimizers that libmuon takes over from, under their own names, as presets over the core."""
