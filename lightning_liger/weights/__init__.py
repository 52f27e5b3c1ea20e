"""Loading from and exporting to Hugging Face folders, also for models too large for one rank."""
