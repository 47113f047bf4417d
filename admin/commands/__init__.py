"""The commands of `loramux`, one file each; heavy imports happen inside the command functions."""
