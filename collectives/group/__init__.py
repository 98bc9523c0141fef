"""The parts of a Communicator below its collectives; each file derives from the one above it in this list.

ordered_group   operations run in the order of issue: set-up, issue, failure and end
memory          arrays that ranks share
messages        messages, as users call them
objects         pickled objects
division        groups made from a group, ranks of one in another
calls           operations prepared once for their arrays, and kept

details         words about an operation, for reports
deadlock        finds ranks that wait for each other in two Communicators
"""
