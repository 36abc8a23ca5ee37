"""Teachers: what scores a student's own tokens. They are found by entry point, in group `agentrl.teachers`."""
