"""What the tests run on: agreement of the ranks after each test, a time limit for each, starting mpirun."""
