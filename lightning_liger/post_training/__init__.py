"""LightningModules of post-training: preference losses, policy gradients, distillation."""
