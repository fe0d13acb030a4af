"""The verbs of the command line, one module a verb or a small group of them.

Each module has ``add(verbs)``, which declares its arguments, and a function that takes the parsed arguments and gives
the exit code. Importing a module loads nothing heavy: torch, NVRTC and templates are imported by the verb that runs.

Results go to stdout, reports to stderr. Exit codes: 0 done, 1 a fault in the input, 2 a fault in the command line, 3
something outside the project is missing, 70 a fault of ours.
"""
