"""Projections: a sparse matrix that maps the student's next-token probabilities to the teacher's tokens."""
