"""From a declared upload to a version in service, or a refused one."""
