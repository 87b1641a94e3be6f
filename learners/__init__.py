"""The learner: DeepSpeed policy, batching, advantages, losses, checkpoints, and the loop that uses them."""
