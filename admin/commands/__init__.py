"""The commands of `loramux`, one file each. Heavy imports happen inside the command functions."""
