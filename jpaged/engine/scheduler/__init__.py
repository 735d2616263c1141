"""What runs in the next step: admission, planning, preemption, and taking in results."""
