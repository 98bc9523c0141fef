"""The base classes and objects of a Communicator below its collectives.

Methods, each file a class from which the Communicator derives:
    memory          arrays that ranks share
    messages        messages, as users call them
    objects         pickled objects, over messages and the collectives
    division        groups made from a group, ranks of one in another
    ordered_group   who is in the group, and the objects that work for it; the other four derive from it

Objects that work for it:
    setup           what a group is made of: communicators of MPI, tables of algorithms, watchdog
    issue           operations in the order of issue, at once or queued
    refusal         why a group cannot be used any more, and the error that says so
    calls           operations prepared once for their arrays, and kept; prepared: one that the program holds
    end             `close`

    details         words about an operation, for reports
    deadlock        finds ranks that wait for each other in two Communicators
"""
