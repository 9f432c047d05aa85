"""What becomes of student tokens that the teacher does not have: a file each."""
