"""The built-in agents, one file each; the file's name is the agent's."""
