"""The commands, a file each: the arguments, and the function that runs it."""
