"""Development programs that the Makefile runs; not part of the installed package."""
