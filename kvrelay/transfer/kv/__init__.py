"""What is special to the hand-over of a KV cache."""
