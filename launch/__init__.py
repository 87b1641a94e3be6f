"""The command line, the local supervisor and the doctor."""
