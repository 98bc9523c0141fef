"""The job: its start and end, agreements of all ranks, objects between them, and requests to stop.

runtime            `mpidl.init`: the world Communicator, threads and device of each rank
ending             ends the job when one rank ends, by an exception, an interrupt or sys.exit
agreement          makes a failure on one rank an error on every rank: `check_everywhere` and others
objects            Python objects to all ranks, as users call it; pickled: the same without a default Communicator, for
                   modules that `runtime` imports
communicator_pool  a Communicator of its own for every engine that needs one
signals            `mpidl.StopSignal`: all ranks stop after the same step
phase              which phase of training this process is in, for the watchdog's reports
model_device       host or GPU: where a model's tensors lie
control_group      limits that a container or scheduler sets, and processes killed for memory
"""
