"""Start-up: plans memory, loads weights, compiles the step programs and keeps them on disk."""
