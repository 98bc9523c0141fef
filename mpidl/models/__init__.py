"""Models written in the project, each in one file."""
