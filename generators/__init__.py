"""The generators: a loop that leases prompts, samples groups, scores and pushes them; and its engines."""
