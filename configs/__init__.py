"""The run's configuration: one strict model composed of every role's own, and the YAML presets."""
