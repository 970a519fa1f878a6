"""What keeps a run going: signs of life and who watches them, tests of the devices, what is recorded of a hang."""
