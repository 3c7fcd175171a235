"""What happens around a training step: settings, processes, device, loop, records. Imports no script and no model."""
