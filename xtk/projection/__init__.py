"""Floor 2: how the student's next-token probability lands on the teacher's tokens."""
