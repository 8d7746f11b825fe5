"""Files and folders that appear whole or not at all, say what they hold, and are checked when they are read."""
