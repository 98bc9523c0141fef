"""Messages from one rank to another.

messages        one rank's sends, receives and probes in one group
channels        which message is which, from and to whom, in which order
message         a message in flight
"""
