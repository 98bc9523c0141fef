"""Harness of the tests: agreement of the ranks after each test, a time limit for each, starting mpirun."""
