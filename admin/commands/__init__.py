"""The commands of `loramux`, one file each, in the groups that `loramux --help` shows.

Heavy imports happen inside the command functions.
"""
