"""The command line: settings from recipe, file and flags, and the help pages."""
