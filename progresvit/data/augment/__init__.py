"""What is done to images before a model sees them: random changes of a training image, and corruptions."""
