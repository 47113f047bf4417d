"""The verbs of the command line, one file each; heavy imports happen inside the verbs."""
