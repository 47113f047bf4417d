"""An example of extensions of loramux: a blob store on plain HTTP, and an eviction policy."""
