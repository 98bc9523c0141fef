"""The operations of a group in time: in which thread they run, which ranks are late, and how a job is ended.

    progress        the thread of asynchronous operations; background_errors: failures that no `wait` has raised
    positions       a page on which each rank writes the operation that it is in
    watchdog        ends a job whose ranks wait in vain, and reports; program: what the program does, for the report;
                    stack: the calls that the main thread is in
    witness         sends the page to the process that waits for the job's end; inbox: receives it
    dropped         frees the MPI communicators of what the garbage collector has taken

To add a field of the watchdog's report: `positions.Position`, and what writes and reads it in `positions.Positions`.
What an operation works with comes from `group.details`, what the program does from `program`. Its text is in
`watchdog.report`, and for a launcher in `mpidl.launch.report`. CONTRIBUTING.md has the steps and the tests.
"""
