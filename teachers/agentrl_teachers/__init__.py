"""Teachers: what scores a student's own tokens. None is shipped yet; third parties register theirs in `agentrl.teachers`."""
