"""Keys and values of other frameworks' command lines, and their names here.

keys       the table of settings that rlhub does not have, and the answer to each
translate  puts rlhub's keys and values in place of others
"""
