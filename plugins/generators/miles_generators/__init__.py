"""The built-in generate functions, one file each; the file's name is the generator's."""
