"""What is special to the hand-over of an embedding, whose length only its producer knows."""
