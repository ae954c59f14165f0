"""Everything a job can choose by name: what makes it, what it needs, and the line of the docs about it. Torch-free."""
