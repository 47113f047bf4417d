"""Reading and writing safetensors and JSON files that are not trusted."""
