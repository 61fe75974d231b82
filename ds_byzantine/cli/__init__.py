"""Room for the commands, one file each."""
