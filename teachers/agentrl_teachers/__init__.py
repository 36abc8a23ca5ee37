"""Teachers: what scores a student's own tokens. None is shipped; others register in group `agentrl.teachers`."""
