"""What a user passes in and gets back: parameters, configuration, outputs and errors, as plain data."""
