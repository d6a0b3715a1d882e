"""Keys and values of other frameworks' command lines, and their names here."""
