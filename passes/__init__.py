"""The passes, one file each, and the manager that runs them. Import neither torch nor a driver."""
