"""Keys and values of other frameworks' command lines, and what they are called here."""
