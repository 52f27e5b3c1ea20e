"""The memory of training a model, without the model's weights and without a GPU."""
